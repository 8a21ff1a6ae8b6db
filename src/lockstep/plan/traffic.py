"""The bytes that an optimised program moves between a device's memory and its core."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

from lockstep.engine import DecodeModel, Engine, used_weights
from lockstep.engine.decoder.heads import kept_by_layer
from lockstep.engine.schedule import Capacity
from lockstep.models.attention import TpuAttention, select_attention
from lockstep.xla import Array, Hlo, Op, Run

_FREE: Final = frozenset(
    "parameter constant get-tuple-element tuple bitcast while conditional call call-update after-all partition-id "
    "replica-id opt-barrier add-dependency iota".split()
)  # fmt: skip

type Kernel = Callable[[Op, Sequence[Sequence[Array]]], int]
"""A function of a custom call and the arrays of each of its operands that returns the bytes that it moves."""


def traffic(hlo: Hlo, kernel: Kernel) -> Iterator[tuple[Run, int]]:
    """The bytes between memory and core of each operation: operands read and results written.

    An operand that a fusion only slices counts as its slice, one that it updates in place as the update. Arrays in a
    memory of the core cost nothing. Padding of tiles is not counted.

    Args:
        kernel: A function that gives the bytes of a custom call to a kernel, which the compiler does not know.

    Yields:
        The run of an operation, and the bytes that it moves each time.
    """
    for run in hlo.runs:
        op = run.op
        kind = op.kind
        if kind in _FREE or kind.endswith("-done"):
            continue
        operands = [hlo.array_of(run.computation, name) for name in op.operands]
        if kind == "custom-call" and "tpu_custom_call" in op.line:
            yield run, kernel(op, operands)
        elif kind == "fusion":
            yield run, _fusion(hlo, op, operands)
        elif kind in ("dynamic-slice", "slice", "gather"):
            yield run, 2 * _hbm(op.arrays)
        elif kind in ("dynamic-update-slice", "scatter"):
            yield run, 2 * _hbm(operands[1 if kind == "dynamic-update-slice" else 2])
        elif kind == "slice-start":  # its result begins with the whole source, of which it reads as much as it writes
            source, destination = op.arrays[:2]
            yield run, destination.bytes * (source.in_hbm + destination.in_hbm)
        elif kind.endswith("-start"):
            yield run, _hbm(op.arrays)  # source and destination are both in its result
        else:
            yield run, _hbm(op.arrays) + sum(_hbm(arrays) for arrays in operands)


def _fusion(hlo: Hlo, op: Op, operands: Sequence[Sequence[Array]]) -> int:
    name = op.called()["calls"][0]
    total, written = 0, _hbm(op.arrays)
    for number, arrays in enumerate(operands):
        use = _use(hlo, name, number)
        if use is None or use.returned:
            total += _hbm(arrays)
        elif _hbm(arrays):
            total += use.bytes
            written -= sum(array.bytes for array in arrays) if use.updated else 0
    return total + max(0, written)


class _Use(NamedTuple):
    """The use of a parameter that a computation does not read as a whole."""

    bytes: int
    updated: bool
    returned: bool


def _use(hlo: Hlo, computation: str, number: int) -> _Use | None:
    """The use of a parameter in a computation; None where it reads all of it."""
    inside = hlo.computations[computation]
    users: dict[str, list[tuple[Op, int]]] = {}
    for op in inside.values():
        for place, operand in enumerate(op.operands):
            users.setdefault(operand, []).append((op, place))
    total, updated, returned = 0, False, False
    todo = [op.name for op in inside.values() if f" parameter({number})" in op.line and op.kind == "parameter"]
    seen = False
    while todo:
        name = todo.pop()
        returned = returned or inside[name].root
        for user, place in users.get(name, ()):
            seen = True
            if user.kind in ("bitcast", "copy", "reshape"):
                todo.append(user.name)
            elif user.kind in ("dynamic-slice", "slice", "gather") and place == 0:
                total += user.bytes
            elif user.kind in ("dynamic-update-slice", "scatter") and place == 0:
                total += 2 * inside[user.operands[1 if user.kind == "dynamic-update-slice" else 2]].bytes
                updated = True
            elif user.kind == "fusion" and (use := _use(hlo, user.called()["calls"][0], place)) is not None:
                total, updated = total + use.bytes, updated or use.updated
                if use.returned:
                    todo.append(user.name)
            else:
                return None
    return _Use(total, updated, returned) if seen or returned else None


def _hbm(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if array.in_hbm)


def copies(hlo: Hlo, dims: tuple[int, ...]) -> list[Op]:
    """The operations that make another array of some dimensions in memory, such as a second page pool."""
    kinds = ("copy", "copy-start", "transpose", "broadcast", "concatenate")
    return [
        run.op
        for run in hlo.runs
        if run.op.kind in kinds and any(array.dims == dims and array.in_hbm for array in run.op.arrays)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The bytes that a decode program moves, per device and decode step."""

    floor_weights: int  # bytes of every weight that a step needs, each counted once
    floor_kv: int  # bytes of K and V of the positions that a step attends to, each counted once
    program: int  # bytes that the program's operations read and write, without the kernels
    kernel: int  # bytes that the kernels read and write: attention, and the one that writes K/V
    per_launch: int  # bytes that the program moves outside its steps, once per launch

    @property
    def floor(self) -> int:
        """The least bytes that a step can move."""
        return self.floor_weights + self.floor_kv

    def compiled(self, steps: int) -> float:
        """The bytes that the program moves per step, a launch's own part spread over its steps."""
        return self.program + self.kernel + self.per_launch / steps

    def ratio(self, steps: int) -> float:
        """The bytes that the program moves over the least that it can move."""
        return self.compiled(steps) / self.floor


def step_bytes(
    text: str,
    model: DecodeModel,
    sizes: Capacity,
    *,
    context: int,
    block_pages: int,
    query_blocks: int = 1,
    unmet: Collection[str] = (),
) -> StepBytes:
    """Count the bytes of a decode program, or of one that verifies drafts.

    Kernels are black boxes to the compiler, so that their bytes follow from their contracts. Attention: per sequence
    whole blocks of pages as far as the sequence reaches, queries once, results once. The kernel that writes K/V, whose
    result is the pool in its own memory: what it writes, read once and written once.

    Args:
        query_blocks: The number of blocks of queries that a sequence has in a step, for each of which its pages are
            fetched.
    """
    positions = block_pages * sizes.page_size
    fetched = -(-context // positions) * positions

    def kernel(op: Op, operands: Sequence[Sequence[Array]]) -> int:
        *scalars, queries, pool = operands
        if "output_to_operand_aliasing" in op.line:  # the result is the memory of one of the operands
            return sum(array.bytes for arrays in scalars for array in arrays) + 2 * queries[0].bytes
        page = pool[0].bytes // pool[0].dims[0] // sizes.page_size
        moved = sizes.slots * fetched * page * query_blocks
        return moved + sum(array.bytes for arrays in (*scalars, queries, op.arrays) for array in arrays)

    program = kernels = launch = 0
    for run, size in traffic(Hlo(text, unmet), kernel):
        if not run.in_step:
            launch += size * run.times
        elif run.op.kind == "custom-call" and "tpu_custom_call" in run.op.line:
            kernels += size * run.times
        else:
            program += size * run.times
    kept = kept_by_layer(model.config, model.heads, model.heads.kept)
    moved = sum(layer.step_bytes(float(context), model.kv_dtype) for layer in kept)
    return StepBytes(
        floor_weights=round(used_weights(model, float(sizes.slots))[0]),
        floor_kv=round(sizes.slots * moved / model.heads.context),
        program=program,
        kernel=kernels,
        per_launch=launch,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftBytes:
    """One program that verifies drafts, beside the one that decodes."""

    width: int  # the positions of a sequence in a step
    bytes_per_accepted_token: float  # per device, where every draft is right
    bytes_per_decoded_token: float  # the same of a decode step, which samples one token of each sequence
    step_s: float
    tokens_per_s: float  # the predicted tokens per second, on all devices of the mesh, where every draft is right


def draft_bytes(engine: Engine, unmet: Collection[str]) -> list[DraftBytes]:
    """Return what each program that verifies moves; none without drafts, or where no kernel reads K and V in place."""
    sizing, model = engine.sizing, engine.decode_model
    assert sizing is not None and model is not None
    sizes, predicted = sizing.sizes, sizing.estimate
    heads = model.heads
    attention = select_attention(
        model.device,
        heads.at_own_positions,
        page_size=sizes.page_size // heads.context,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
    )
    if not sizes.verify_widths or not isinstance(attention, TpuAttention):
        return []
    context = int(next(choice for choice in sizing.considered if choice.layout == sizing.layout).demand.context)

    def moved(name: str, block_pages: int, query_blocks: int, steps: int) -> float:
        moved_bytes = step_bytes(
            engine.programs[name].text(),
            model,
            sizes,
            context=context,
            block_pages=min(block_pages, sizes.pages_per_sequence),
            query_blocks=query_blocks,
            unmet=unmet,
        )
        return moved_bytes.compiled(steps) / sizes.slots

    decoded, blocks = moved("decode", attention.decode_blocks.pages, 1, sizes.steps), attention.prefill_blocks
    rows = []
    for width in sizes.verify_widths:
        seconds = predicted.verify_cost(width) * predicted.step_s
        fetches = heads.context * -(-width // (heads.context * blocks.queries))
        step = moved(f"verify_{width}", blocks.pages, fetches, sizes.draft_tokens // width)
        rows.append(
            DraftBytes(
                width=width,
                bytes_per_accepted_token=step / width,
                bytes_per_decoded_token=decoded,
                step_s=seconds,
                tokens_per_s=predicted.active * width / seconds,
            )
        )
    return rows
