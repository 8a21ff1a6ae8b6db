"""What ``plan --json`` writes."""

from types import SimpleNamespace
from unittest import mock

from lockstep.main.plan import summary
from lockstep.main.plan.summary import _renamed, rollout_step
from lockstep.main.plan.table import _split


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
