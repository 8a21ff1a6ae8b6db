"""What ``plan --json`` writes."""

from types import SimpleNamespace
from unittest import mock

import pytest

from lockstep.engine.sizing.cost_model import Estimate
from lockstep.plan import summary, table
from lockstep.plan.step_time import DECODE_OVER_BEST, StepTime
from lockstep.plan.summary import _renamed, rollout_step, run_cost
from lockstep.plan.table import _exact, _expected, _split
from lockstep.training import TrainerConfig


def test_keys_stay_when_the_code_has_another_name():
    sizes = {"page_copies": 1, "idle_replicas": 2, "slots": 3}
    assert _renamed(sizes) == {"forks": 1, "resting": 2, "slots": 3}
    assert list(_renamed({"reshard": "a", "prefill": "b", "copy_pages": "c"})) == ["relay", "prefill", "fork"]


def sampling(steps, total_s):
    workload = SimpleNamespace(steps=steps)
    return SimpleNamespace(workload=workload, sizing=SimpleNamespace(estimate=SimpleNamespace(total_s=total_s)))


def test_a_step_has_its_share_of_the_rollout_and_none_of_what_training_does_not_wait_for():
    plan = SimpleNamespace(sampling=[sampling(None, 50.0), sampling(4, 12.0)])
    with mock.patch.object(summary, "train_time", lambda plan: SimpleNamespace(step_s=1.0)):
        split = rollout_step(plan)
        assert split is not None and (split.rollout_s, split.update_s, split.step_s) == (3.0, 1.0, 4.0)
        assert rollout_step(SimpleNamespace(sampling=[sampling(None, 50.0)])) is None
    assert _split(split) == "a step: 4 s, of which rollout 3 s (75%, without prefill) and update 1 s\n"


@pytest.mark.parametrize("rate", [None, 2.5])
def test_a_run_costs_what_its_steps_are_expected_to_take_on_every_chip(rate):
    """On 32 chips: 100 steps, each 3 s at best and 1 s more in published ones, and 2 s of rollouts at best."""
    time = StepTime(compute_s=3.0, memory_s=1.0, collectives_s=1.0, tokens=1000, exposed_s=1.0)
    workload = SimpleNamespace(training=SimpleNamespace(trainer=TrainerConfig(num_train_steps=100)))
    decode = SimpleNamespace(
        workload=SimpleNamespace(steps=4, name="rollout"),
        sizing=SimpleNamespace(estimate=SimpleNamespace(total_s=8.0, step_s=0.01)),
    )
    plan = SimpleNamespace(
        workload=workload, topology=SimpleNamespace(chips=32), sampling=[decode], dollars_per_chip_hour=rate
    )
    with mock.patch.object(summary, "train_time", lambda plan: time):
        cost = run_cost(plan)
        assert cost is not None and cost.step_s == 4.0 + 2.0 * DECODE_OVER_BEST
        assert cost.chip_hours == pytest.approx(100 * cost.step_s * 32 / 3600)
        assert cost.dollars == (None if rate is None else pytest.approx(2.5 * cost.chip_hours))
        with mock.patch.object(table, "train_time", lambda plan: time):
            text = _expected(plan)
    assert "expected: train step 4 s (-6% to +8% in published steps), 250 tokens/s\n" in text
    assert "rollout: decode step 18.6 ms (-23% to +30%)\n" in text
    told = "the run's 100 steps of 7.72 s: 6.862 chip hours"
    assert text.endswith(f"{told}\n" if rate is None else f"{told}, $17 at $2.5 each\n")


def test_what_is_not_trained_has_no_run_to_pay_for():
    with mock.patch.object(summary, "train_time", lambda plan: None):
        assert run_cost(SimpleNamespace(sampling=[])) is None


def test_what_exact_numerics_cost_is_told():
    estimate = Estimate(
        reshard_s=0.0, memory_s=3.0, compute_s=0.5, collectives_s=1.0, steps=1.0, active=1.0, reread_s=1.0
    )
    one = SimpleNamespace(workload=SimpleNamespace(name="rollout"), sizing=SimpleNamespace(estimate=estimate))
    with mock.patch.object(table, "train_time", lambda plan: SimpleNamespace(exact_s=2.0, merge_s=0.0)):
        text = _exact(SimpleNamespace(sampling=[one]))
    assert "16 rows at a time: a train step 2 s more; rollout: decode steps of 4 s, 3 s with numerics fast" in text
    with mock.patch.object(
        table, "train_time", lambda plan: SimpleNamespace(exact_s=2.0, merge_s=1.0, merge_bytes=1 << 30)
    ):
        assert "a train step 2 s more, 1 s of them merging adapters (1.00 GiB read and written)" in _exact(
            SimpleNamespace(sampling=[])
        )
