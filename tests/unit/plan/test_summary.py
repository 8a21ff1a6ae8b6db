"""What ``plan --json`` writes."""

from lockstep.plan.summary import _renamed


def test_keys_stay_when_the_code_has_another_name():
    sizes = {"page_copies": 1, "idle_replicas": 2, "slots": 3}
    assert _renamed(sizes) == {"forks": 1, "resting": 2, "slots": 3}
    assert list(_renamed({"reshard": "a", "prefill": "b", "copy_pages": "c"})) == ["relay", "prefill", "fork"]
