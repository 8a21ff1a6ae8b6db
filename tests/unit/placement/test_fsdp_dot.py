"""Products with gathered parameters: the same numbers, and one collective for each use."""

import functools
import re
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import Mesh, NamedSharding

from lockstep.placement import COMPUTE_AXES, fsdp_dot, make_mesh, parameter_shardings

BATCH, POSITION, EMBED, MLP = Axis("batch", 8), Axis("position", 3), Axis("embed", 16), Axis("mlp", 24)
HEADS = (Axis("kv_head", 2), Axis("head_size", 4))


def operands() -> dict[str, hax.NamedArray]:
    draw = np.random.default_rng(0)
    axes = {
        "x": (BATCH, POSITION, EMBED),
        "up": (EMBED, MLP),
        "down": (MLP, EMBED),
        "v": (EMBED, *HEADS),
        "o": (*HEADS, EMBED),
    }
    sizes = {name: [axis.size for axis in each] for name, each in axes.items()}
    return {name: hax.named(draw.standard_normal(sizes[name], np.float32), each) for name, each in axes.items()}


def loss(weights: dict[str, hax.NamedArray], recomputed: bool = False) -> jax.Array:
    product = functools.partial(fsdp_dot, recomputed=recomputed)

    def layer(weights: dict[str, hax.NamedArray]) -> hax.NamedArray:
        x = weights["x"]
        inner = hax.auto_sharded(hax.tanh(product(x, weights["up"], EMBED)))
        x = hax.auto_sharded(x + product(inner, weights["down"], MLP).rearrange(x.axes))
        return x + product(hax.auto_sharded(product(x, weights["v"], EMBED)), weights["o"], HEADS).rearrange(x.axes)

    x = (jax.checkpoint(layer) if recomputed else layer)(weights)
    return hax.sum(x * x).scalar()


def on(mesh: Mesh, arrays: dict[str, hax.NamedArray], recomputed: bool = False) -> Any:
    """The gradient's function, compiled for a mesh, and its arguments."""
    shardings = parameter_shardings(arrays, mesh)
    rows = NamedSharding(mesh, jax.P(("dp", "fsdp")))
    shardings["x"] = jax.tree.map(lambda _: rows, shardings["x"])
    with jax.set_mesh(mesh), hax.axis_mapping(COMPUTE_AXES):
        placed = jax.device_put(arrays, shardings)
        return jax.jit(jax.grad(functools.partial(loss, recomputed=recomputed)), out_shardings=shardings).lower(
            placed
        ).compile(), placed


@pytest.mark.parametrize(
    ("shape", "recomputed"), [("1,4,1", False), ("1,4,1", True), ("2,2,1", False), ("1,2,2", True)]
)
def test_gradients_are_those_of_one_device(shape: str, recomputed: bool) -> None:
    arrays = operands()
    expected = jax.grad(loss)(arrays)
    compiled, placed = on(make_mesh(shape, jax.devices()[:4]), arrays, recomputed)
    for name, gradient in compiled(placed).items():
        want = np.asarray(expected[name].array)
        np.testing.assert_allclose(gradient.array, want, rtol=2e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_weight_is_gathered_for_each_pass_and_its_gradient_scattered_once(recomputed: bool) -> None:
    compiled, _ = on(make_mesh("1,4,1", jax.devices()[:4]), operands(), recomputed)
    text = compiled.as_text()
    kinds = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    assert {kind: kinds.count(kind) for kind in kinds} == {"all-gather": 8, "reduce-scatter": 4}


def test_rows_that_every_device_has_are_not_added_up() -> None:
    mesh, arrays = make_mesh("1,4,1", jax.devices()[:4]), operands()
    expected = jax.grad(loss)(arrays)["down"]
    with jax.set_mesh(mesh), hax.axis_mapping({"mlp": "tp"}):
        gradient = jax.jit(jax.grad(loss))(jax.device_put(arrays, parameter_shardings(arrays, mesh)))["down"]
    np.testing.assert_allclose(gradient.array, expected.array, rtol=2e-5, atol=1e-3)
