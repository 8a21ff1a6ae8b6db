import pytest

from lockstep.models import recomputes_layers
from lockstep.models.remat import POLICIES, name_of_policy, scan_policy


def test_true_and_false_are_names_too():
    assert [name_of_policy(policy) for policy in (True, False, "dots")] == ["full", "nothing", "dots"]
    assert scan_policy(True) == scan_policy("full") and scan_policy(False) == scan_policy("nothing")
    assert len({repr(scan_policy(policy)) for policy in POLICIES}) == 4


@pytest.mark.parametrize(("policy", "again"), [("nothing", False), ("dots", False), ("full", True), ("offload", True)])
def test_which_policies_compute_layers_again(policy, again):
    assert recomputes_layers(policy) is again
