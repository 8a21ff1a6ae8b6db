"""TPU7x as its compiler has it: two devices per chip, and options without which our programs would copy and wait."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engine.decoder.build import compiler_options
from lockstep.hosts import Ledger
from lockstep.placement import make_mesh
from lockstep.placement.decode_mesh import make_decode_mesh
from lockstep.placement.device import Compiler, Program, chip_of, compile_program, on_one_chip
from lockstep.xla import Topology, topology


@pytest.fixture(scope="module")
def tpu7x() -> Topology:
    return topology("tpu7x-16")


def test_a_chip_is_two_devices_and_a_tensor_group_begins_with_them(tpu7x: Topology) -> None:
    assert tpu7x.describe() == "tpu7x-16: 8 chips (2x2x2) of 2 devices, 2 hosts with 4 each"
    assert chip_of(tpu7x.devices[0]).name == "TPU7x core"
    mesh = make_mesh("auto", tpu7x.devices)
    for tensor in (2, 4, 8):
        groups = make_decode_mesh(mesh, tensor).mesh.devices.reshape(-1, 2)
        assert all(on_one_chip(list(pair)) for pair in groups), tensor
    assert all(on_one_chip(list(row)) for row in make_mesh("1,-1,2", tpu7x.devices).devices.reshape(-1, 2))


@pytest.mark.parametrize("generation", ["TPU8t", "TPU8i"])
def test_the_next_generation_is_not_known_to_the_compiler(tpu7x: Topology, generation: str) -> None:
    """Where it is, `COMPILERS` and the table of slices can have it, and plan need not refuse it any more."""
    for name in (generation, generation.removeprefix("TPU"), generation.replace("TPU", "v")):
        with pytest.raises(Exception, match="Invalid TPU external name"):
            topologies.get_topology_desc(platform="tpu", topology_name=f"{name.lower()}:2x2x1")


def compiled(tpu7x: Topology, name: str, function: Any, shapes: list[Any], options: dict[str, str]) -> Program:
    mesh = make_mesh("auto", tpu7x.devices[:1])
    structs = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, PartitionSpec())) for each in shapes]
    return compile_program(name, function, structs, mesh=mesh, ledger=Ledger(), compiler=Compiler(options=options))


@pytest.mark.slow
def test_gathers_of_decode_stay_on_the_tensorcore(tpu7x: Topology) -> None:
    """A gather of pages beside a scatter to them, as in https://github.com/jax-ml/jax/issues/40553."""

    def step(pool: jax.Array, pages: jax.Array) -> jax.Array:
        return 2 * pool.at[pages[:8]].set(1.0)[pages]

    shapes = [((2332, 128, 128), jnp.bfloat16), ((1056,), jnp.int32)]
    for name, offloaded in (("decode", False), ("verify_8", False), ("prefill", True)):
        program = compiled(tpu7x, name, step, shapes, compiler_options(tpu7x.devices[0], name))
        assert ("gather_offload" in program.text()) is offloaded, name


def test_a_launch_begins_with_no_copy_of_the_weights(tpu7x: Topology) -> None:
    def steps(weights: jax.Array, x: jax.Array, count: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ weight), None

        return jax.lax.fori_loop(0, count, lambda _, x: jax.lax.scan(layer, x, weights)[0], x)

    shapes = [((4, 2048, 2048), jnp.bfloat16), ((16, 2048), jnp.bfloat16), ((), jnp.int32)]
    copied = 4 * 2048 * 2048 * 2
    assert compiled(tpu7x, "decode", steps, shapes, {}).memory().temp_size_in_bytes >= copied
    options = compiler_options(tpu7x.devices[0], "decode")
    assert compiled(tpu7x, "decode", steps, shapes, options).memory().temp_size_in_bytes < copied // 8
