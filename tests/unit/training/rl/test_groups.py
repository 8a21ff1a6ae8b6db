"""Which groups are learned from, and which answers of them."""

import dataclasses
import types

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.health import State
from lockstep.hosts import Ledger
from lockstep.training import StepInfo
from lockstep.training.rl.groups import Groups, choose_groups
from lockstep.training.rl.rewarding import Rewards
from lockstep.training.rl.rewards import FunctionReward, LengthReward
from lockstep.training.rl.sampled import Sampled
from lockstep.types import Drafts
from tests import rollouts as runs
from tests import tiny
from tests.saved_states import as_saved
from tests.unit.training.rl.made_up import completion
from tests.unit.training.rl.parrot import Cut, Looping, Parrot


def groups(first, rewards):
    """Groups of two answers to the questions from ``first`` on."""
    total = np.array(rewards, float).reshape(-1)
    answers = [completion(place // 2, place % 2, (first + place // 2, place % 2)) for place in range(len(total))]
    return Groups(
        questions=np.arange(first, first + len(rewards)),
        completions=answers,
        rewards=Rewards(total=total, components={"a": total * 2}, failed={"a": 1}, late={"a": 2}),
    )


def test_one_sampling_is_taken_as_it_is():
    chosen = choose_groups([groups(10, [[1, 1], [0, 1]])], 2)
    assert chosen.questions.tolist() == [10, 11] and chosen.signal.tolist() == [False, True]


def test_groups_with_a_signal_come_first_and_others_fill_up():
    parts = [groups(10, [[1, 1], [0, 1], [0, 0]]), groups(20, [[1, 0], [2, 2], [3, 4]])]
    for wanted, expected in ((3, [11, 20, 22]), (5, [10, 11, 12, 20, 22]), (2, [11, 20])):
        chosen = choose_groups(parts, wanted)
        assert chosen.questions.tolist() == expected
        # Answers and rewards go with their questions.
        assert [each.tokens[0] for each in chosen.completions[::2]] == expected
        assert (chosen.rewards.components["a"] == 2 * chosen.rewards.total).all()
    assert choose_groups(parts, 3).totals.tolist() == [[0, 1], [1, 0], [3, 4]]


def shaped(judged, totals, dropped=None):
    """One sampling whose groups of two have a reward for being right, another one in all, and answers without one."""
    made = groups(10, totals)
    flat = np.array(judged, float).reshape(-1)
    lost = np.zeros(len(flat), bool) if dropped is None else np.array(dropped).reshape(-1)
    return dataclasses.replace(made, rewards=dataclasses.replace(made.rewards, judged=flat, dropped=lost))


def test_groups_that_are_all_wrong_are_filtered_though_their_lengths_are_rewarded_differently():
    part = shaped([[0, 0], [0, 1], [1, 1]], [[0, -0.5], [0, 1], [1, 1]])
    assert part.mixed.tolist() == [False, True, False], "0 < right answers < G, DAPO's equation 11"
    assert part.signal.tolist() == [True, True, False]
    other = dataclasses.replace(part, questions=part.questions + 10)
    assert choose_groups([part, other], 2).questions.tolist() == [11, 21]
    taken = choose_groups([part, other], 4)
    assert taken.rewards.judged.reshape(-1, 2).tolist() == [[0, 0], [0, 1], [1, 1], [0, 1]]


def test_groups_with_a_reward_that_failed_are_dropped_and_taken_last():
    part = shaped([[0, 1], [0, 1], [1, 1]], [[0, 1], [0, 1], [1, 1]], [[True, False], [False, False], [False, False]])
    assert part.dropped.tolist() == [True, False, False]
    assert part.mixed.tolist() == part.signal.tolist() == [False, True, False]
    other = dataclasses.replace(part, questions=part.questions + 10)
    assert choose_groups([part, other], 4).questions.tolist() == [11, 12, 21, 22]
    assert choose_groups([part, other], 5).dropped.tolist() == [True, False, False, False, False]


def test_failures_of_all_samplings_are_counted():
    rewards = Groups.concatenate([groups(0, [[1, 2]]), groups(5, [[3, 4]])]).rewards
    assert rewards.failed == {"a": 2} and rewards.late == {"a": 4}


def rollout_of(engine, **run):
    """The columns of a rollout without devices, by group, and its scalars."""
    tracker = runs.Recorder()
    trainer, rollouts, model = runs.make(engine=engine, run=run, tracker=tracker)
    assert rollouts.batch(0, model) is not None and trainer.tracker.flush(60)
    columns = {
        name: column.reshape(-1, runs.GROUP, *column.shape[1:]) for name, column in rollouts.rollout.columns.items()
    }
    return columns, tracker.scalars[1]


def test_answers_that_were_cut_give_no_gradient_and_count_for_the_others():
    plain, _ = rollout_of(Cut({0}))
    masked, _ = rollout_of(Cut({0}), mask_truncated=True)
    assert plain["loss_mask"].any(axis=-1).all()
    assert (masked["loss_mask"].any(axis=-1) == [False, True, True, True]).all()
    np.testing.assert_array_equal(masked["advantage"], plain["advantage"])


@pytest.mark.parametrize("health", [True, False])
def test_the_health_of_all_answers_of_a_rollout_is_logged(health, monkeypatch):
    monkeypatch.setattr(runs, "ROW", 64)
    tracker = runs.Recorder()
    trainer, rollouts, model = runs.make(engine=Looping(), run={"rollout": {"health": health}}, tracker=tracker)
    assert rollouts.batch(0, model) is not None
    rollouts.flush()
    assert trainer.tracker.flush(60)
    shares = {name.rpartition("/")[2]: value for name, value in tracker.scalars[1].items() if "/health/" in name}
    wrong = (State.LOOP, State.CUT, State.SAME_ANSWER)  # to every question
    assert shares == ({state: (state in wrong) / runs.GROUP for state in State} if health else {})


def test_the_tokens_of_every_attempt_are_counted():
    _, scalars = rollout_of(Parrot(), rollout={"max_attempts": 3}, rewards=[LengthReward()])
    assert scalars["rollout/attempts"] == 3 and scalars["rollout/groups_without_signal"] == 1
    assert scalars["rollout/generated_tokens"] == 3 * runs.BATCH * 2


def test_dynamic_sampling_never_has_to_ask_a_question_again():
    text = (
        r"max_attempts is 4 and a rollout has 4 questions, each asked once: it may ask 16, and there are 12\. .* most 3"
    )
    with pytest.raises(ConfigError, match=text):
        runs.make(engine=Parrot(), run={"rollout": {"max_attempts": 4}})
    runs.make(engine=Parrot(), run={"rollout": {"max_attempts": 3}})


def choosy(row, prompt):
    """A reward that cannot be had for one answer to the second question."""
    if prompt.text == CHOSEN[1] and row.generation_id == 2:
        raise RuntimeError("no opinion")
    return float(row.generation_id)


CHOSEN: list[str] = []


def test_a_failed_reward_can_drop_its_group_from_the_loss():
    CHOSEN[:] = [
        runs.questions().prompts[number].text for number in runs.questions().drawn(0, runs.BATCH // runs.GROUP)
    ]
    reward = FunctionReward(function=f"{__name__}:choosy", on_failure="drop_group")
    columns, scalars = rollout_of(Parrot(), rewards=[reward])
    learned = columns["loss_mask"].any(axis=(1, 2))
    assert learned.tolist() == [True, False, True, True]
    assert scalars["rollout/groups_dropped"] == scalars["rollout/groups_without_signal"] == 0.25
    assert scalars["reward/choosy/failed"] == 1


def test_gspo_with_the_clipping_of_tokens_says_that_it_clips_nothing(caplog):
    runs.make(loss={"loss": "gspo"}, engine=Parrot())
    assert "loss is gspo and clip_epsilon is 0.2, which clips nothing" in caplog.text
    caplog.clear()
    runs.make(loss={"loss": "gspo", "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4}, engine=Parrot())
    assert "clips nothing" not in caplog.text


def test_much_clipping_of_answers_that_are_new_is_said_once(caplog):
    _, rollouts, model = runs.make(engine=Parrot())

    def step(number, clipped):
        rollouts.batch(number, model)
        info = StepInfo(
            step=number, model=model, loss=1.0, step_duration=0.1, metrics={"clipped": clipped, "logprob_gap": 0.5}
        )
        rollouts.on_step(info)
        return caplog.text.count("clipping takes away the gradient")

    assert [step(0, 0.2), step(1, 0.21), step(2, 0.9)] == [0, 1, 1]
    assert "step 2: clipping takes away the gradient of 21 % of the tokens" in caplog.text
    assert "train/logprob_gap is 0.5" in caplog.text


def test_the_time_of_samples_is_that_of_their_callback_alone():
    tracker = runs.Recorder()
    trainer, rollouts, model = runs.make(engine=Parrot(), tracker=tracker)
    for number, seconds in enumerate(({"HfSaves": 3.0}, {"inference_eval": 2.0, "HfSaves": 3.0})):
        rollouts.batch(number, model)
        rollouts.on_step(StepInfo(step=number, model=model, loss=1.0, step_duration=0.1, hook_seconds=seconds))
    assert trainer.tracker.flush(60)
    assert [tracker.scalars[step]["time/inference_eval_s"] for step in (1, 2)] == [0.0, 2.0]


def test_a_rollout_goes_on_at_the_temperature_it_was_sampled_with():
    def made(temperature):
        run = {"num_iterations": 2, "rollout": {"temperature": temperature}}
        _, rollouts, model = runs.make(engine=Parrot(), run=run)
        return rollouts, model

    rollouts, model = made(1.0)
    rollouts.batch(2, model)
    within = as_saved(rollouts.state())
    rollouts.batch(3, model)
    between = as_saved(rollouts.state())
    text = r"sampled with rollout\.temperature 1\.0, and now it is 0\.5: .* Use 1\.0 until step 4,"
    with pytest.raises(ConfigError, match=text):
        made(0.5)[0].load_state(within)
    made(1.0)[0].load_state(within)
    made(0.5)[0].load_state(between)


TWICE = {"num_iterations": 2}


@pytest.mark.parametrize(
    ("run", "loss", "row_length", "text"),
    [
        ({**TWICE, "rollout": {"n_generations": 8}}, {}, 24, r"4 answers per .*n_generations\), .* are 8\. Use the"),
        ({"minibatches": 2}, {}, 24, r"4 questions per rollout .* minibatches / .*, and now there are 8\. Use the"),
        (TWICE, {"use_rollout_logprobs": False}, 24, r"columns advantage, l.* now .* old_logprobs, .* until step 4,"),
        (TWICE, {}, 32, r"rows have 24 tokens and .* now they have 32 .* earlier data\.max_seq_len, .* until step 4,"),
    ],
)
def test_a_rollout_goes_on_with_the_questions_and_columns_it_was_begun_with(monkeypatch, run, loss, row_length, text):
    _, rollouts, model = runs.make(engine=Parrot(), run=TWICE)
    rollouts.batch(2, model)
    state = as_saved(rollouts.state())
    monkeypatch.setattr(runs, "ROW", row_length)
    with pytest.raises(ConfigError, match=text):
        runs.make(engine=Parrot(), run=run, loss=loss)[1].load_state(state)


def test_a_start_that_trains_no_step_keeps_the_rest_of_a_rollout():
    _, rollouts, model = runs.make(engine=Parrot(), run=TWICE)
    rollouts.batch(2, model)
    state = as_saved(rollouts.state())
    _, later, _ = runs.make(engine=Parrot(), run=TWICE)
    later.load_state(state)
    np.testing.assert_equal(later.state(), state)
    assert state["rollout"]["number"] == 1
    later.batch(3, model)
    assert later.state()["rollout"] is None


def test_answers_of_an_earlier_process_get_their_rewards_again():
    _, rollouts, _ = runs.make(loss=runs.AHEAD, run={"rollout_ahead": 1, "num_iterations": 2})
    sampler = rollouts._sampler
    assert sampler.n_questions == runs.BATCH // runs.GROUP and sampler.learned_at(3) == 7
    tokens = tiny.tokenizer().encode("three apples, eleven pears")
    answers = [
        completion(place, generation, tokens[: 1 + generation])
        for place in range(sampler.n_questions)
        for generation in range(runs.GROUP)
    ]
    scoring = rollouts._rewarder.begin()
    kept = Sampled(number=3, questions=[4, 0, 1, 2], completions=answers, scoring=scoring).state()
    scoring.close()
    resumed = sampler.resumed(as_saved(kept))
    groups = rollouts._rewarded(resumed)
    assert groups.questions.tolist() == [4, 0, 1, 2] and groups.completions == answers
    texts = [tiny.tokenizer().decode(answer.tokens) for answer in answers]
    expected = [
        (text.count("e") % 2 == 0) - 0.5 * len(a.tokens) / runs.NEW for text, a in zip(texts, answers, strict=True)
    ]
    np.testing.assert_allclose(groups.rewards.total, expected)


class Asked:
    """An engine that answers everything in the same way, and notes what it was asked."""

    def __init__(self):
        self.ledger, self.requests, self.prepared = Ledger(), [], []

    def free_bytes(self, model):
        return 1

    def check(self, model, requests):
        raise AssertionError("these tests begin after the check")

    def prepare(self, model, requests, *, free):
        self.prepared.append(requests)
        return {}

    def stream(self, model, requests, **_):
        self.requests.append(requests)
        for request in requests:
            answers = [answer_of(request, generation) for generation in range(runs.GROUP)]
            yield [completion(request.prompt_id, generation, answer) for generation, answer in enumerate(answers)]


def answer_of(request, generation):
    return request.prompt_tokens[-1 - generation :]


def test_the_answers_of_the_last_epoch_are_drafts():
    engine = Asked()
    _, rollouts, model = runs.make(engine=engine, run={"rollout": {"drafts": "last_round"}})
    sampler = rollouts._sampler
    known = {}
    for number in range(4):  # 12 questions, 4 in a rollout: the fourth begins the second epoch
        sampled = sampler.sample(number, 0, model)
        sampled.scoring.close()
        for question, request in zip(sampled.questions, engine.requests[-1], strict=True):
            assert request.drafts == Drafts(answers=known.get(question, ()))
            known[question] = tuple(tuple(answer_of(request, generation)) for generation in range(runs.GROUP))
    assert all(request.drafts.answers for request in engine.requests[3])
    assert all(request.drafts is not None for request in engine.prepared[0]), "compiled before the first draft"


def test_a_rollout_that_is_ended_leaves_no_drafts(monkeypatch):
    """The checkpoint then has those of before, and all attempts are sampled again with them."""
    engine = Asked()
    _, rollouts, model = runs.make(engine=engine, run={"rollout": {"drafts": "last_round"}})
    sampler = rollouts._sampler
    sampler.sample(0, 0, model).scoring.close()
    before = rollouts.state()["drafts"]
    sampler.sample(1, 0, model).scoring.close()
    assert rollouts.state()["drafts"]["kept"] != before["kept"]
    ended = types.SimpleNamespace(ended=True)
    monkeypatch.setattr(sampler.session, "generate", lambda *args, **options: ended)  # asked to end
    assert sampler.sample(1, 1, model) is None
    np.testing.assert_equal(rollouts.state()["drafts"], before)


def test_a_run_that_goes_on_has_the_drafts_of_the_one_before():
    _, rollouts, model = runs.make(engine=Asked(), run={"rollout": {"drafts": "last_round"}})
    for number in range(4):  # in the fourth, answers are compared with those of the first
        rollouts._sampler.sample(number, 0, model).scoring.close()
    state = as_saved(rollouts.state())
    _, later, _ = runs.make(run={"rollout": {"drafts": "last_round"}})
    later.load_state(state)
    found = [each._sampler.earlier.drafts(question) for question in range(12) for each in (rollouts, later)]
    assert found[::2] == found[1::2] and all(each.answers for each in found) and any(each.compared for each in found)
