"""Bytes that a decode step moves between memory and core: the least that it could, and what its program does."""

import dataclasses
from collections.abc import Collection, Sequence

from lockstep.engine.footprint import Shapes
from lockstep.plan.hlo import Array, Hlo, Op
from lockstep.plan.traffic import traffic
from lockstep.schedule import ScheduleSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Per device and decode step.

    Args:
        floor_weights: every weight that a step needs, once.
        floor_kv: K and V of all positions before the step's, once.
        program: all that the program's operations read and write, the attention kernel left out.
        kernel: what the attention kernel reads and writes.
        per_launch: what the program moves outside its steps, once per launch.
    """

    floor_weights: int
    floor_kv: int
    program: int
    kernel: int
    per_launch: int

    @property
    def floor(self) -> int:
        """The least that a step can move."""
        return self.floor_weights + self.floor_kv

    def compiled(self, steps: int) -> float:
        """What the program moves, a launch's own part spread over its steps."""
        return self.program + self.kernel + self.per_launch / steps

    def ratio(self, steps: int) -> float:
        """`compiled` over `floor`."""
        return self.compiled(steps) / self.floor


def step_bytes(
    text: str, shapes: Shapes, sizes: ScheduleSizes, *, context: int, block_pages: int, unmet: Collection[str] = ()
) -> StepBytes:
    """Counts a decode program's bytes.

    The attention kernel is a black box to the compiler, so its bytes follow from its contract: per sequence whole
    blocks of pages as far as the sequence reaches, queries once, results once.

    Args:
        text: of the compiled decode program.
        shapes: of the model in the program's layout.
        sizes: of the program.
        context: positions that every slot attends to.
        block_pages: pages that the kernel fetches at a time.
        unmet: scopes of conditions that do not hold, see `Hlo`.
    """
    positions = block_pages * sizes.page_size
    fetched = -(-context // positions) * positions

    def kernel(op: Op, operands: Sequence[Sequence[Array]]) -> int:
        *scalars, queries, pool = operands
        page = pool[0].bytes // pool[0].dims[0] // sizes.page_size
        moved = sizes.slots * fetched * page
        return moved + sum(array.bytes for arrays in (*scalars, queries, op.arrays) for array in arrays)

    program = kernels = launch = 0
    for run, size in traffic(Hlo(text, unmet), kernel):
        if not run.in_step:
            launch += size * run.times
        elif run.op.kind == "custom-call" and "tpu_custom_call" in run.op.line:
            kernels += size * run.times
        else:
            program += size * run.times
    weights = sum(
        shapes.decode_bytes(leaf, layout)
        for name, leaf, layout in shapes.leaves
        if name != "embed" or shapes.weights.lm_head is None
    )
    heads = shapes.config.num_kv_heads / shapes.grid.tensor
    kv = sizes.slots * context * shapes.config.num_layers * 2 * heads * shapes.config.head_size * shapes.dtype.itemsize
    return StepBytes(floor_weights=weights, floor_kv=int(kv), program=program, kernel=kernels, per_launch=launch)
