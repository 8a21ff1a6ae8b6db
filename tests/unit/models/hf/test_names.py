"""Which Hugging Face tensor each parameter has, and how their axes correspond."""

import dataclasses

import numpy as np
import pytest

from lockstep.models.families.llama import TENSORS
from lockstep.models.families.registry import family_of
from lockstep.models.hf.names import HFTensor, parameters, stored_shapes
from lockstep.models.skeleton import skeleton
from tests.unit.engine.models import FAMILIES, LLAMA

SIZES = {"embed": 6, "kv_head": 4, "q_heads_per_group": 2, "head_size": 3}
Q = HFTensor("layer.{layer}.q", (("kv_head", "q_heads_per_group", "head_size"), ("embed",)))
AXES = ("embed", "kv_head", "q_heads_per_group", "head_size")


def test_a_name_has_the_number_of_its_layer():
    assert Q.name(3) == "layer.3.q" and HFTensor("norm", (("embed",),)).name(None) == "norm"


def test_axes_are_flattened_into_the_stored_dimensions():
    assert Q.shape(SIZES) == (4 * 2 * 3, 6)


def test_what_is_stored_is_read_back():
    array = np.random.default_rng(0).standard_normal([SIZES[axis] for axis in AXES])
    stored = Q.to_stored(array, AXES, SIZES)
    np.testing.assert_array_equal(stored[2 * 3 : 2 * 3 + 3], array[:, 1, 0].T)
    np.testing.assert_array_equal(Q.from_stored(stored, AXES, SIZES), array)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "tied"])
def test_every_parameter_of_a_family_has_its_tensors(family):
    config = FAMILIES[family]
    found = parameters(skeleton(10, config), family_of(config).tensors)
    names = [each.stored.name(layer) for each in found for layer in each.layers]
    assert len(set(names)) == len(names) == len(stored_shapes(found))
    assert sum(each.layers == range(2) for each in found) >= 9


def test_shapes_are_those_that_hugging_face_stores():
    config = dataclasses.replace(LLAMA, num_layers=1)
    found = stored_shapes(parameters(skeleton(10, config), TENSORS))
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (10, 16)
    assert found["model.layers.0.self_attn.q_proj.weight"] == (4 * 8, 16)
    assert found["model.layers.0.self_attn.k_proj.weight"] == (2 * 8, 16)
    assert found["model.layers.0.self_attn.o_proj.weight"] == (16, 4 * 8)
    assert found["model.layers.0.mlp.down_proj.weight"] == (16, 24)
