import numpy as np
import pytest

from lockstep.health import State
from lockstep.report import AlarmsConfig, NoopTracker, conversation_text, read_jsonl
from lockstep.report.saved_rows import read_rows
from lockstep.text import Prompt
from lockstep.training.rl.conversations import Conversation
from lockstep.training.rl.groups import Groups
from lockstep.training.rl.questions import AnswerRows, Questions
from lockstep.training.rl.rewarding import Rewards
from lockstep.training.rl.rollout_log import (
    ROLLOUTS_FILE,
    RewardTrend,
    RolloutLog,
    StepClock,
    StepTimes,
    answer_metrics,
    reward_metrics,
)
from lockstep.training.rl.sampled import Sampled
from lockstep.types import FinishReason
from tests import tiny
from tests.unit.report.test_turns import TURNS
from tests.unit.training.rl.made_up import completion


def test_rewards_by_component():
    totals = np.array([[1.0, 0.0], [1.0, 1.0]])
    found = reward_metrics(totals, {"gsm8k": totals.reshape(-1)}, {"gsm8k": 1}, {"gsm8k": 2})
    assert found["reward/mean"] == found["reward/gsm8k/mean"] == 0.75
    assert found["reward/std"] == pytest.approx(np.std([1, 0, 1, 1]))
    assert (found["reward/failed"], found["reward/gsm8k/late"]) == (1, 2)


def test_answers_and_groups():
    answers = [completion(0, 0, (1, 2, 3)), completion(0, 1, (1,), FinishReason.LENGTH), completion(0, 2, (1, 2))]
    assert answer_metrics(answers, np.array([True, False, False, False]), np.array([False, False, True, False])) == {
        "rollout/answer_length_mean": 2.0,
        "rollout/answer_length_max": 3.0,
        "rollout/cut_share": pytest.approx(1 / 3),
        "rollout/groups_without_signal": 0.75,
        "rollout/groups_dropped": 0.25,
    }


def test_times_are_of_the_last_steps():
    times = StepTimes(window=2)
    assert times.add(100.0, 5) == (100.0, 0.05)
    times.add(2.0, 10)
    assert times.add(4.0, 50) == (3.0, 10.0)


def test_times_are_of_the_last_ten_steps_as_the_name_of_the_metric_says():
    times = StepTimes()
    assert [times.add(float(step == 0), 1)[0] for step in range(11)][-2:] == [0.1, 0.0]


def test_the_clock_adds_up_phases():
    clock = StepClock()
    clock.add("update", 1.5)
    clock.add("update", 0.5)
    clock.lap("reward")
    assert clock.seconds["update"] == 2.0 and clock.seconds["reward"] > 0


def test_the_progress_display_has_the_reward_and_where_the_time_went():
    trend, clock = RewardTrend(window=2), StepClock()
    assert str(trend) == ""
    for reward in (0.0, 0.25, 0.5):
        trend.add(reward)
    clock.add("rollout_generate", 1.25)
    assert f"{trend}  {clock}" == "reward 0.500 (last 2: 0.375)  rollout 1.25 s, reward 0.00 s"


class Tracker(NoopTracker):
    def __init__(self):
        self.scalars, self.rows = {}, []

    def log(self, metrics, *, step):
        self.scalars.update(metrics)

    def log_rows(self, name, rows, *, step):
        self.rows += rows


def log_rollout(tmp_path, tracker, conversations=None, **options):
    """A rollout of two questions with two answers each, of which one loops."""
    tokenizer = tiny.tokenizer()
    prompts = [Prompt(id=number, text=f"What is {number} plus 7?") for number in (0, 1)]
    tokens = [tuple(tokenizer.encode(prompt.text)) for prompt in prompts]
    questions = Questions(prompts=prompts, tokens=tokens, seed=0, row_length=64)
    rows = AnswerRows(questions=questions, tokenizer=tokenizer, stop=())
    answers = [(60, 61), [60, *[70] * 40], (62, 63), (64,)]
    completions = [completion(place // 2, place % 2, answer) for place, answer in enumerate(answers)]
    total = np.array([1.0, 0.0, 1.0, 0.5])
    rewards = Rewards(total=total, components={"length": total}, failed={}, late={})
    groups = Groups(questions=np.array([0, 1]), completions=completions, rewards=rewards, conversations=conversations)
    sampled = Sampled(number=0, questions=[0, 1], completions=completions, scoring=None)
    log = RolloutLog(tracker, tmp_path, rows, shown=2, **options)
    log.report(3, groups, groups, [sampled])
    log.flush()
    return read_jsonl(tmp_path / ROLLOUTS_FILE)


def test_the_health_of_all_answers_is_a_share_and_that_of_those_shown_is_in_their_rows(tmp_path):
    tracker = Tracker()
    rows = log_rollout(tmp_path, tracker, alarms=AlarmsConfig())
    shares = {state: tracker.scalars[f"rollout/health/{state}"] for state in State}
    assert shares == {state: 0.25 * (state == "loop") for state in State}
    assert [(row["rank"], row["health"], row["loop_from"]) for row in rows] == [
        ("best", "", None),
        ("worst", "loop", 1),
    ]
    assert rows == [row.to_dict() for row in tracker.rows]


def test_a_conversation_is_a_list_of_turns_in_the_file_and_lines_in_the_table(tmp_path):
    tracker, conversations = Tracker(), [Conversation(number=number, question=number // 2) for number in range(4)]
    for conversation in conversations:
        conversation.messages = [{name: turn[name] for name in turn if name != "reward"} for turn in TURNS]
        conversation.rewards = {1: 0.0, 3: 1.0}
    rows = log_rollout(tmp_path, tracker, conversations)
    assert [row["turns"] for row in rows] == [TURNS, TURNS]
    assert rows[0]["generated_text"] == conversations[0].said and '"expression"' in conversations[0].said
    assert [row.to_dict()["generated_text"] for row in tracker.rows] == [conversation_text(TURNS)] * 2
    assert conversations[0].reward == 1.0 and not {"turns"} & tracker.rows[0].to_dict().keys()
    assert [row.shown for row in read_rows(tmp_path / ROLLOUTS_FILE)] == [conversation_text(TURNS)] * 2


def test_rows_of_a_rollout_whose_health_fails_or_is_not_wanted_have_none(tmp_path, monkeypatch, caplog):
    tracker = Tracker()
    assert [row["health"] for row in log_rollout(tmp_path / "off", tracker)] == [None, None]
    monkeypatch.setattr("lockstep.training.rl.rollout_log.measure_round", lambda answers, vocabulary: 1 / 0)
    assert [row["health"] for row in log_rollout(tmp_path / "broken", tracker, alarms=AlarmsConfig())] == [None, None]
    assert "the health of the answers of step 3 failed on the leader; training goes on" in caplog.text
    assert "reward/mean" in tracker.scalars and not any("/health/" in name for name in tracker.scalars)
