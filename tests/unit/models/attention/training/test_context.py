"""Rows whose positions are split over devices: losses and gradients are those of whole rows."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.models import Experts, LlamaConfig
from lockstep.models.attention import SplitPositions
from lockstep.models.trainable import skeleton
from lockstep.placement import batch_spec, compute_axes, make_mesh
from lockstep.training import lm_loss, parameter_shardings

VOCAB = 32


def test_each_device_has_an_early_and_a_late_piece():
    split = SplitPositions(axis="cp", devices=2, length=8)
    assert split.order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert split.joined(jnp.asarray(split.order)[None])[0].tolist() == list(range(8))


@pytest.mark.parametrize("devices", [2, 4, 3])
def test_states_return_to_the_order_of_the_row(devices):
    split = SplitPositions(axis="cp", devices=devices, length=4 * devices)
    mesh = make_mesh(f"cp={devices}", jax.devices()[:devices])
    x = jnp.asarray(split.order, jnp.float32)[None, :, None]
    with jax.set_mesh(mesh):
        found = jax.jit(lambda x: split.restore(x, PartitionSpec(("dp", "fsdp"))))(x)
    assert found.ravel().tolist() == list(range(split.length)) and found.sharding.spec[1] == "cp"


def differentiate(mesh_shape, devices, *, length=32, packed=True, **values):
    """The loss of some rows and its gradient on a mesh."""
    config = LlamaConfig(
        **{"hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **values},
        max_seq_len=length,
    )
    mesh, rng = make_mesh(mesh_shape, jax.devices()[:devices]), np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, VOCAB, (4, length)), "loss_mask": rng.random((4, length)) < 0.8}
    if packed:
        batch["segment_ids"] = np.sort(rng.integers(0, 4, (4, length)))
    batch = jax.device_put(batch, NamedSharding(mesh, batch_spec(mesh)))

    def loss(model, batch):
        with hax.axis_mapping(compute_axes(mesh)):
            parts = lm_loss(model, batch)
        return parts.total / parts.weight

    drawn = jax.tree.map(  # jax.random takes seconds to compile
        lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), skeleton(VOCAB, config)
    )
    with jax.set_mesh(mesh):
        model = jax.device_put(drawn, parameter_shardings(drawn, mesh))
        value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, batch)
    return value, *jax.tree.leaves(gradient)


def check(one, many):
    for ours, theirs in zip(many, one, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_loss_and_gradient_are_those_of_one_device(packed):
    check(differentiate("1,1,1", 1, packed=packed), differentiate("cp=2,tp=2", 4, packed=packed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "values"),
    [pytest.param("cp=4", {"length": 2048}, marks=pytest.mark.nightly), ("fsdp=2,cp=2", {"attn_backend": "vanilla"})],
)
def test_in_blocks_of_queries_and_with_all_scores(mesh, values):
    check(differentiate("1,1,1", 1, **values), differentiate(mesh, 4, **values))


@pytest.mark.nightly  # in make slow: the tests around it
@pytest.mark.parametrize("packed", [True, False])
def test_the_kernel_of_a_split_row(packed, monkeypatch):
    """As TPUs run it, but interpreted."""
    from lockstep.models import llama_attention

    values = {"length": 512, "packed": packed}
    one = differentiate("1,1,1", 1, **values)
    interpreted = functools.partial(llama_attention.self_attention, interpret=True)
    monkeypatch.setattr(llama_attention, "self_attention", interpreted)
    check(one, differentiate("cp=2,tp=2", 4, attn_backend="splash", **values))


def test_rows_that_cannot_be_split_evenly_are_refused():
    with pytest.raises(ConfigError, match=r"30 positions.*cp=2 .*4 equal pieces.*multiple of 4"):
        differentiate("cp=2", 2, length=30)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"experts": Experts(num_experts=4, num_experts_per_tok=2, intermediate_dim=8)}, "a model with experts"),
        ({"numerics": "exact"}, "numerics exact"),
    ],
)
def test_models_that_need_whole_rows_are_refused(values, what):
    with pytest.raises(ConfigError, match=rf"cp=2, which splits the positions of a row, and {what} needs whole rows"):
        differentiate("cp=2", 2, **values)
