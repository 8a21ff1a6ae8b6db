"""Bytes that an optimised program moves between memory and core."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from lockstep.plan.hlo import Array, Hlo, Op, Run

_FREE: Final = frozenset(
    "parameter constant get-tuple-element tuple bitcast while conditional call after-all partition-id replica-id "
    "opt-barrier add-dependency iota".split()
)  # fmt: skip

type Kernel = Callable[[Op, Sequence[Sequence[Array]]], int]
"""Bytes that a custom call moves, from the operation and the arrays of each operand."""


def traffic(hlo: Hlo, kernel: Kernel) -> Iterator[tuple[Run, int]]:
    """Bytes between memory and core of each operation, per run: operands read and results written.

    Of an operand that a fusion only slices, the slice counts; of one that it updates in place, the update. What lies in
    a memory of the core costs nothing. Padding of tiles is not counted.

    Args:
        hlo: the program.
        kernel: bytes of a custom call to a kernel; the compiler knows nothing of what it does.
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
    """What a computation does with a parameter of which it does not read all."""

    bytes: int
    updated: bool
    returned: bool
    """Whether the parameter, under another shape perhaps, is what the computation results in."""


def _use(hlo: Hlo, computation: str, number: int) -> _Use | None:
    """What a computation does with a parameter; None where it reads all of it."""
    inside = hlo.computations[computation]
    users: dict[str, list[tuple[Op, int]]] = {}
    for each in inside.values():
        for place, operand in enumerate(each.operands):
            users.setdefault(operand, []).append((each, place))
    total, updated, returned = 0, False, False
    todo = [each.name for each in inside.values() if f" parameter({number})" in each.line and each.kind == "parameter"]
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
    """Operations that make another array of these dimensions in memory: a second page pool, say."""
    kinds = ("copy", "copy-start", "transpose", "broadcast", "concatenate")
    return [
        run.op
        for run in hlo.runs
        if run.op.kind in kinds and any(array.dims == dims and array.in_hbm for array in run.op.arrays)
    ]
