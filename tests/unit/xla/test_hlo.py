"""Counts read off compiled programs, on programs whose counts are known."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.engine.sampling.sampler import SamplingState, active_features, never_used, sample
from lockstep.placement import make_mesh
from lockstep.placement.decode_mesh import make_decode_mesh
from lockstep.plan.traffic import traffic
from lockstep.types import SamplingParams
from lockstep.xla import Hlo, collectives

OUTER, INNER = 5, 3


def program(steps: int | None) -> str:
    """A loop of ``steps`` turns (None: an argument says) around a loop of 3 with two sums; one sum after."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("a", "b")

    def device(x: Any, turns: Any) -> Any:
        def inner(_: int, x: Any) -> Any:
            return jax.lax.psum(jnp.sin(jax.lax.psum(x, "b")), "b")

        def outer(_: int, x: Any) -> Any:
            return jax.lax.fori_loop(0, INNER, inner, x)

        return jax.lax.psum(jax.lax.fori_loop(0, turns if steps is None else steps, outer, x), "a")

    mapped = jax.shard_map(
        device, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec(None, "b"), check_vma=False
    )
    arguments = (
        jax.ShapeDtypeStruct((8, 16), np.float32, sharding=NamedSharding(mesh, spec)),
        jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec())),
    )
    return jax.jit(mapped).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("steps", [OUTER, None])
def test_loops_count_as_they_turn(steps: int | None) -> None:
    found = collectives(Hlo(program(steps)), 4)
    inside = sum(one.times for one in found if set(one.groups) == {(0, 1), (2, 3)})
    after = [one for one in found if set(one.groups) == {(0, 2), (1, 3)}]
    # XLA may run the last turn of a loop apart from the others; the sum stays.
    assert inside == 2 * INNER * (steps or 1)
    assert [one.times for one in after] == [1]
    assert {one.bytes for one in found} == {4 * 8 * 4}
    assert {one.in_step for one in found} == ({False} if steps else {True, False})
    assert not after[0].crosses([0, 1, 0, 1]) and after[0].crosses([0, 0, 1, 1])


SPARSECORE = """
HloModule jit_step

%called (x.1: f32[16]) -> f32[16] {
  %x.1 = f32[16]{0} parameter(0)
  ROOT %all-reduce.1 = f32[16]{0} all-reduce(%x.1), replica_groups={{0,1},{2,3}}, to_apply=%add
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %start = ((), (), s32[]{:S(2)}) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %update = ((f32[16]{0}), f32[16]{0}) call-update(%start, %x)
  ROOT %done = f32[16]{0} call-done(%update)
}
"""


def test_a_collective_on_a_sparsecore_counts() -> None:
    """As the TPU compiler prints what it moves there on TPU7x."""
    (found,) = collectives(Hlo(SPARSECORE), 4)
    assert (found.kind, found.times, found.bytes, found.groups) == ("all-reduce", 1, 64, ((0, 1), (2, 3)))
    moved = [(run.op.kind, size) for run, size in traffic(Hlo(SPARSECORE), lambda op, operands: 0) if size]
    assert moved == [("all-reduce", 2 * 64)], "once, not by the call too"


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        Hlo("hello")


def test_what_a_kernel_says_of_itself_may_take_several_lines() -> None:
    text = """HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %kernel = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="splash"}
  ROOT %sum = f32[8]{0} add(%kernel, %p)
}
"""
    assert [run.op.name for run in Hlo(text).runs] == ["p", "kernel", "sum"]
    assert 'op_name="splash"' in Hlo(text).runs[1].op.line


def test_filters_that_nobody_asks_for_are_not_counted() -> None:
    """The scopes of `ActiveFeatures` are in a compiled program; a condition that never holds costs its quiet branch."""
    decode_mesh, rows, size = make_decode_mesh(make_mesh("1,1,2", jax.devices()[:2]), 2), 2, 256

    def device(logits: Any, slots: Any) -> Any:
        state = SamplingState(
            words=jnp.zeros((rows, 3), jnp.uint32),
            temperature=slots,
            filters={"top_k": slots.astype(jnp.int32), "top_p": slots, "min_p": slots},
        )
        features = active_features(state, slots > 0, decode_mesh.replica_axes)
        return sample(logits, logits, state, features, jnp.zeros(rows, jnp.int32), decode_mesh).token

    split = PartitionSpec(None, decode_mesh.tensor_axes)
    mapped = jax.shard_map(
        device, mesh=decode_mesh.mesh, in_specs=(split, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
    )
    arguments = (
        jax.ShapeDtypeStruct((rows, 2 * size), np.float32, sharding=NamedSharding(decode_mesh.mesh, split)),
        jax.ShapeDtypeStruct((rows,), np.float32, sharding=decode_mesh.sharding()),
    )
    text = jax.jit(mapped).lower(*arguments).compile().as_text()

    def times(*params: SamplingParams) -> int:
        return sum(one.times for one in collectives(Hlo(text, never_used(params)), 2))

    greedy, plain = SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=1, temperature=0.7)
    # Tokens and their numbers are gathered at each step; filters exchange slots for parts of the vocabulary and back.
    assert times(greedy) == times(plain) == 2
    filtered = [dataclasses.replace(plain, **asked) for asked in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1})]
    assert [times(params) for params in filtered] == [2 + 2] * 3
    assert times(greedy, *filtered) == 2 + 2
    none = {"temperature", "top_k", "top_p", "min_p", "filters", "shortlist"}
    assert never_used([dataclasses.replace(greedy, top_k=5)]) == none
    assert never_used(filtered[2:]) == {"top_k", "top_p", "shortlist"}
