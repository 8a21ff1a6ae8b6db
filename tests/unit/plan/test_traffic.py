"""Bytes that a program moves."""

from lockstep.plan.traffic import StepBytes, copies, traffic
from lockstep.xla import Array, Hlo

TEXT = """HloModule known

%fused (p0: bf16[6,64,64], p1: s32[], p2: bf16[8,64]) -> bf16[8,64] {
  %p0 = bf16[6,64,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[8,64]{1,0:S(1)} parameter(2)
  %zero = s32[] constant(0)
  %slice = bf16[1,64,64]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,64}
  %flat = bf16[64,64]{1,0} bitcast(%slice)
  ROOT %dot = bf16[8,64]{1,0} dot(%p2, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%renamed (q0: bf16[64,64]) -> bf16[64,64] {
  %q0 = bf16[64,64]{1,0} parameter(0)
  ROOT %as_is = bf16[64,64]{1,0} bitcast(%q0)
}

%nested (n0: bf16[64,64], n1: bf16[8,64]) -> bf16[8,64] {
  %n0 = bf16[64,64]{1,0} parameter(0)
  %n1 = bf16[8,64]{1,0:S(1)} parameter(1)
  %inner = bf16[64,64]{1,0} fusion(%n0), kind=kLoop, calls=%renamed
  ROOT %product = bf16[8,64]{1,0:S(1)} dot(%n1, %inner), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], bf16[8,64], bf16[6,64,64])) -> (s32[], bf16[8,64], bf16[6,64,64]) {
  %s = (s32[], bf16[8,64]{1,0:S(1)}, bf16[6,64,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[8,64]{1,0:S(1)} get-tuple-element(%s), index=1
  %w = bf16[6,64,64]{2,1,0} get-tuple-element(%s), index=2
  %one = s32[] constant(2)
  %next = s32[] add(%i, %one)
  %y = bf16[8,64]{1,0:S(1)} fusion(%w, %i, %x), kind=kOutput, calls=%fused
  ROOT %t = (s32[], bf16[8,64]{1,0:S(1)}, bf16[6,64,64]{2,1,0}) tuple(%next, %y, %w)
}

%condition (s: (s32[], bf16[8,64], bf16[6,64,64])) -> pred[] {
  %s = (s32[], bf16[8,64]{1,0:S(1)}, bf16[6,64,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(6)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (w: bf16[6,64,64], x: bf16[8,64]) -> bf16[6,64,64] {
  %w = bf16[6,64,64]{2,1,0} parameter(0)
  %x = bf16[8,64]{1,0:S(1)} parameter(1)
  %head = bf16[64,64]{1,0} parameter(2)
  %last = bf16[8,64]{1,0:S(1)} fusion(%head, %x), kind=kOutput, calls=%nested
  %start = s32[] constant(1)
  %init = (s32[], bf16[8,64]{1,0:S(1)}, bf16[6,64,64]{2,1,0}) tuple(%start, %x, %w)
  %loop = (s32[], bf16[8,64]{1,0:S(1)}, bf16[6,64,64]{2,1,0}) while(%init), condition=%condition, body=%body
  %same = bf16[6,64,64]{2,1,0} get-tuple-element(%loop), index=2
  ROOT %copy = bf16[6,64,64]{0,1,2} copy(%same)
}
"""


def test_bytes_of_a_text_with_a_known_answer() -> None:
    # From 1 to 6 by twos: three turns, each of which reads one slice of the stack; x never leaves the core.
    hlo = Hlo(TEXT)
    moved = {run.op.name: (size, run.times) for run, size in traffic(hlo, lambda op, operands: 0)}
    scalars = 4
    assert moved["y"] == (2 * 64 * 64 + scalars, 3)
    # All of a weight, though a fusion inside the fusion does no more than give it another shape.
    assert moved["last"] == (2 * 64 * 64, 1)
    assert moved["copy"] == (2 * 2 * 6 * 64 * 64, 1)
    assert [op.name for op in copies(hlo, (6, 64, 64))] == ["copy"]
    assert Array("bf16", (8, 64), True).bytes == 1024


SLICES = """HloModule slices

ENTRY %main (w: f32[8,4], i: s32[]) -> f32[8,4] {
  %w = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = f32[1,4]{1,0} dynamic-slice(%w, %i, %i), dynamic_slice_sizes={1,4}
  %start = ((f32[8,4]{1,0}), f32[2,4]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[2:4], [0:4]}
  %two = f32[2,4]{1,0:S(1)} slice-done(%start)
  ROOT %out = f32[8,4]{1,0} dynamic-update-slice(%w, %one, %i, %i)
}
"""


def test_a_slice_is_read_and_written_and_the_rest_of_its_array_is_not() -> None:
    moved = {run.op.name: size for run, size in traffic(Hlo(SLICES), lambda op, operands: 0)}
    assert moved == {"one": 2 * 4 * 4, "start": 2 * 4 * 4, "out": 2 * 4 * 4}


def test_a_launch_is_spread_over_its_steps() -> None:
    found = StepBytes(floor_weights=60, floor_kv=40, program=90, kernel=20, per_launch=80)
    assert found.floor == 100 and found.compiled(8) == 120.0 and found.ratio(8) == 1.2
