"""Counting collectives where the answer is known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from lockstep.placement import make_mesh
from lockstep.xla import Hlo, collectives, summed, vmem

TEXT = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p = (s32[], bf16[8,128]) parameter(0)
  %all-reduce.1 = bf16[8,128]{1,0:T(8,128)(2,1)} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], bf16[8,128]) tuple(%i, %all-reduce.1)
}

%condition (p.1: (s32[], bf16[8,128])) -> pred[] {
  %p.1 = (s32[], bf16[8,128]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %constant.7 = s32[]{:T(128)} constant(32)
  ROOT %compare = pred[] compare(%i.1, %constant.7), direction=LT
}

%wrapped (q: bf16[8,128]) -> bf16[32,128] {
  ROOT %all-gather.3 = bf16[32,128]{1,0} all-gather(%q), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
}

%quiet (v: bf16[8,128]) -> bf16[8,128] {
  %v = bf16[8,128] parameter(0)
  ROOT %collective-permute.9 = bf16[8,128] collective-permute(%v), source_target_pairs={{0,1},{1,0}}
}

%heard (v.1: bf16[8,128]) -> bf16[8,128] {
  %v.1 = bf16[8,128] parameter(0)
  ROOT %fusion.9 = bf16[8,128] fusion(%v.1), kind=kCustom, calls=%scattered
}

%scattered (u: bf16[8,128]) -> bf16[8,128] {
  %u = bf16[8,128] parameter(0)
  ROOT %all-to-all.9 = bf16[8,128] all-to-all(%u), channel_id=7, replica_groups={{0,1},{2,3}}
}

%outer_body (r: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %zero = s32[] constant(0)
  %turned = (s32[], bf16[8,128]) tuple(%zero, %x)
  %while.1 = (s32[], bf16[8,128]) while(%turned), condition=%condition, body=%body
  %conditional.1 = bf16[8,128] conditional(%which, %x, %x), branch_computations={%quiet, %heard}, META
  %cp = (bf16[4,4]{1,0}, bf16[4,4]{1,0}, u32[]) collective-permute-start(%y), source_target_pairs={{0,2},{1,3}}
  ROOT %t.2 = (s32[], bf16[8,128]) tuple(%i, %z)
}

%outer_condition (r.1: (s32[], bf16[8,128], s32[])) -> pred[] {
  %i.2 = s32[] get-tuple-element(%r.1), index=0
  %steps = s32[] get-tuple-element(%r.1), index=2
  ROOT %compare.2 = pred[] compare(%i.2, %steps), direction=LT
}

ENTRY %main (a: bf16[8,128]) -> bf16[8,128] {
  %while.2 = (s32[], bf16[8,128]) while(%a), condition=%outer_condition, body=%outer_body
  %start = ((bf16[8,128]), bf16[32,128]) async-start(%b), calls=%wrapped
  %fusion = bf16[8] fusion(%c), backend_config={SMALL}
  ROOT %fusion.2 = bf16[8] fusion(%c), backend_config={LARGE}
}
"""
USED = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"%d"}]'
TEXT = (
    TEXT.replace("META", 'metadata={op_name="while/body/SCOPE/cond"}')
    .replace("SMALL", USED % 4096)
    .replace("LARGE", USED % 3145728)
)


def test_loops_count_as_often_as_they_turn_and_groups_know_their_hosts():
    every = collectives(Hlo(TEXT), 4)
    found = {one.kind: one for one in summed(every, hosts=[0, 0, 1, 1])}
    assert set(found) == {"all-reduce", "all-gather", "collective-permute", "all-to-all"}
    # 32 layers in a loop whose own number of turns is an argument, counted once: 2 KiB, a device receives as much.
    assert (found["all-reduce"].count, found["all-reduce"].bytes) == (32, 32 * 2 * 2048 // 2)
    assert (found["all-reduce"].devices, found["all-reduce"].crosses_hosts) == (2, False)
    assert (found["all-gather"].count, found["all-gather"].bytes) == (1, 32 * 128 * 2 * 3 // 4)
    assert (found["all-gather"].devices, found["all-gather"].crosses_hosts) == (4, True)
    assert (found["collective-permute"].count, found["collective-permute"].crosses_hosts) == (1, True)
    assert found["collective-permute"].bytes == 32
    # What is outside that loop is of a launch, not of a step.
    assert {one.kind for one in every if not one.in_step} == {"all-gather"}


def test_one_branch_of_a_condition_counts():
    held, unmet = ({one.name for one in collectives(Hlo(TEXT, names), 4)} for names in ((), ("SCOPE",)))
    assert held - unmet == {"all-to-all.9"}, "a collective inside a fusion"
    assert unmet - held == {"collective-permute.9"}


def test_the_fusion_of_an_all_reduce_and_a_slice_is_a_reduce_scatter():
    text = """HloModule scatter

%all-reduce-scatter.3 (x: bf16[32,128]) -> bf16[8,128] {
  %x = bf16[32,128] parameter(0)
  %all-reduce.5 = bf16[32,128] all-reduce(%x), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = bf16[8,128] dynamic-slice(%all-reduce.5, %first, %zero), dynamic_slice_sizes={8,128}
}

ENTRY %main (a: bf16[32,128]) -> bf16[8,128] {
  ROOT %fusion = bf16[8,128] fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
    (found,) = collectives(Hlo(text), 4)
    assert (found.kind, found.received) == ("reduce-scatter", 3 * 8 * 128 * 2)


def test_vector_memory_of_the_hungriest_operation():
    assert vmem(TEXT) == 3145728
    assert vmem("") == 0


@pytest.mark.parametrize("layers", [3, 7])
def test_a_real_program(layers):
    """Two sums over pairs of devices per layer, compiled here and read back."""
    mesh = make_mesh("1,2,2", jax.devices()[:4])

    def f(x):
        def layer(_, x):
            return jax.lax.psum(x, "tp") * 0.5 + jax.lax.psum(x * x, "tp")

        return jax.lax.fori_loop(0, layers, layer, x)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("fsdp", None), out_specs=P("fsdp", None), check_vma=False)
    text = jax.jit(mapped).lower(jnp.zeros((4, 64), jnp.float32)).compile().as_text()
    every = collectives(Hlo(text), 4)
    found = summed(every, [0, 0, 1, 1])
    assert {one.kind for one in found} == {"all-reduce"}
    assert sum(one.bytes for one in found) == 2 * layers * 2 * 64 * 4, "each device sums half of 1 KiB"
    assert not any(one.crosses_hosts for one in found)
    assert any(one.crosses_hosts for one in summed(every, [0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("kind", "target", "slices", "received"), [("ALL_REDUCE", "1,2", 2, 512), ("ALL_GATHER", "1:4", 4, 1536)]
)
def test_what_the_runtime_exchanges_between_slices_is_a_collective(kind, target, slices, received):
    attributes = f'_xla_megascale_target="{{{target}}}x{{0:3}}",_xla_megascale_transfer_type="{kind}"'
    text = f"""HloModule slices

ENTRY %main (a: f32[1,1,128]) -> f32[1,1,128] {{
  %send = (f32[1,1,128], u32[], token[]) send(%a, %t), is_host_transfer=true, frontend_attributes={{
_xla_host_transfer_handler_name="xla_megascale_runtime",{attributes}}}
}}
""".replace("{\n_xla", "{_xla")
    (found,) = summed(collectives(Hlo(text), 8), hosts=[0] * 8)
    assert (found.kind, found.devices, found.crosses_slices) == (kind.lower().replace("_", "-"), slices, True)
    assert found.bytes == received and found.crosses_hosts
