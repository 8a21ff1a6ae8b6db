import numpy as np
import pytest

from lockstep.training.rl.rollout_log import RewardTrend, StepClock, StepTimes, answer_metrics, reward_metrics
from lockstep.types import FinishReason
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
