"""Kv heads that several devices have, because there are more devices than heads."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engine.replicated_kv_heads import replicate_kv_heads, replicates_kv_heads
from lockstep.errors import ConfigError
from lockstep.models import read_decoder
from lockstep.placement import LazyWeight, place
from tests.unit.engine.models import LLAMA, mesh_of, model_on


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "replicates"),
    [(4, 2, 2, False), (4, 2, 4, True), (4, 4, 8, False), (12, 4, 8, False), (12, 2, 6, True), (12, 3, 4, False)],
)
def test_heads_are_replicated_where_several_devices_divide_their_query_heads(
    heads: int, kv_heads: int, tensor: int, replicates: bool
) -> None:
    config = dataclasses.replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads)
    assert replicates_kv_heads(config, tensor) == replicates


def test_a_model_with_enough_heads_is_left_as_it_is() -> None:
    config, weights = read_decoder(model_on("1,1,1"))
    again = replicate_kv_heads(config, weights, 2)
    assert again[0] is config and again[1] is weights


def test_each_device_gets_a_kv_head_and_its_query_heads() -> None:
    config, weights = read_decoder(model_on("1,1,1"))
    changed, replicated = replicate_kv_heads(config, weights, 4)
    assert (changed.num_kv_heads, changed.num_heads, changed.head_size) == (4, 4, config.head_size)
    k, q = replicated.layers.k, replicated.layers.q
    assert isinstance(k, LazyWeight) and isinstance(q, LazyWeight)
    assert k.shape == (2, 16, 4, 8) and q.shape == (2, 16, 4, 1, 8)
    first_k, first_q = (np.asarray(getattr(weights.layers, name)[0]) for name in "kq")
    np.testing.assert_array_equal(k.assemble(k.parts[0][0]), np.repeat(first_k, 2, axis=1))
    np.testing.assert_array_equal(q.assemble(q.parts[0][0]), first_q.reshape(16, 4, 1, 8))
    assert replicated.layers.gate is weights.layers.gate, "weights without heads stay"


def test_a_weight_that_is_cut_inside_a_head_is_refused() -> None:
    config, weights = read_decoder(model_on("1,1,1"))
    mesh = mesh_of("1,4,1")
    cut = place(np.asarray(weights.layers.k), NamedSharding(mesh, PartitionSpec(None, None, None, "fsdp")))
    layers = dataclasses.replace(weights.layers, k=cut)
    with jax.no_execution(True), pytest.raises(ConfigError, match=r"weight k cut inside a kv head.*at most 2\."):
        replicate_kv_heads(config, dataclasses.replace(weights, layers=layers), 4)
