"""Gathering an array in one exchange and in two, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lockstep.placement import gather, make_mesh


@pytest.mark.parametrize("neighbours", [None, 2])
def test_the_whole_is_in_order_and_its_gradient_is_scattered_while_it_is_summed(neighbours: int | None) -> None:
    mesh = make_mesh("1,4,1", jax.devices()[:4])
    weight = np.arange(24.0).reshape(3, 8)
    factors = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)

    def total(part: jax.Array, factors: jax.Array) -> jax.Array:
        whole = gather(part, "fsdp", 1, neighbours=neighbours)
        return jnp.sum(whole * factors)

    def local(part: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = gather(part, "fsdp", 1, neighbours=neighbours)
        return whole[None], jax.grad(total)(part, factors[0])

    split = P(None, "fsdp")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, P("fsdp")), out_specs=(P("fsdp"), split), check_vma=False)
    with jax.set_mesh(mesh):
        text = jax.jit(mapped).lower(weight, factors).as_text()
        whole, gradient = jax.jit(mapped)(weight, factors)
    np.testing.assert_array_equal(whole, np.broadcast_to(weight, whole.shape))
    np.testing.assert_allclose(gradient, factors.sum(axis=0), rtol=1e-6)
    assert text.count("stablehlo.all_gather") == (1 if neighbours is None else 2)
