import dataclasses

import jax
import numpy as np
import pytest

from lockstep.models import LlamaLMHeadModel, as_trainable, recomputes_layers, with_policy
from lockstep.models.remat import POLICIES, name_of_policy, scan_policy
from tests import tiny


def test_true_and_false_are_names_too():
    assert [name_of_policy(policy) for policy in (True, False, "dots")] == ["full", "nothing", "dots"]
    assert scan_policy(True) == scan_policy("full") and scan_policy(False) == scan_policy("nothing")
    assert len({repr(scan_policy(policy)) for policy in POLICIES}) == 4


@pytest.mark.parametrize(("policy", "again"), [("nothing", False), ("dots", False), ("full", True), ("offload", True)])
def test_which_policies_compute_layers_again(policy, again):
    assert recomputes_layers(policy) is again


def test_another_policy_leaves_the_arrays_alone():
    model = as_trainable(tiny.CONFIG, tiny.numpy_weights())
    changed = with_policy(model, "dots")
    assert isinstance(changed, LlamaLMHeadModel)
    assert changed.layers.gradient_checkpointing == scan_policy("dots")
    assert changed.config == dataclasses.replace(tiny.CONFIG, gradient_checkpointing="dots")
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(changed), strict=True):
        assert one is other or np.shares_memory(one, other)
