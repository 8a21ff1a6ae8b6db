"""Weights gathered for a product and their gradients scattered, by the TPU compiler, over all chips of a slice."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.placement import gather, make_mesh
from lockstep.xla import Hlo, collectives, topology

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")


@pytest.mark.parametrize(
    "slice_name",
    ["v5p-64", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v5p-256", "v6e-8", "v6e-16", "tpu7x-128"))],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_device_receives_a_weight_once_and_its_gradient_once(slice_name: str, axis: int) -> None:
    mesh = make_mesh("auto", list(topology(slice_name).devices))
    rows, spec = P("fsdp"), P(*("fsdp" if dimension == axis else None for dimension in range(2)))
    shape = tuple(max(4096, 128 * mesh.size) if dimension == axis else 2048 for dimension in range(2))
    weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    x = jax.ShapeDtypeStruct((16 * mesh.size, shape[0]), jnp.bfloat16, sharding=NamedSharding(mesh, rows))

    def product(part: jax.Array, x: jax.Array) -> jax.Array:
        return x @ gather(part, "fsdp", axis)

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        mapped = jax.shard_map(product, mesh=mesh, in_specs=(spec, rows), out_specs=rows, check_vma=False)
        return jnp.sum(jnp.square(mapped(weight, x).astype(jnp.float32)))

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower(weight, x).compile().as_text()
    moved = collectives(Hlo(text), mesh.size)
    once = 2 * shape[0] * shape[1] * (mesh.size - 1) / mesh.size
    assert 1 <= sum(exchange.times * exchange.received for exchange in moved) / (2 * once) < 1.15
