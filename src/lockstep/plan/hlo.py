"""An optimised program as the compiler prints it: its operations, how often each runs, and what it moves.

Loops are counted as they turn. A loop whose end is an argument (the steps of a decode launch) counts once, so that what
is found is of one step; everything around it is counted as of one launch.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

_BITS: Final = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "token": 0, "opaque": 0, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
COLLECTIVES: Final = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_HEAD: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY: Final = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_CALLED: Final = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|called_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_FREE: Final = frozenset(
    "parameter constant get-tuple-element tuple bitcast while conditional call after-all partition-id replica-id "
    "opt-barrier add-dependency iota".split()
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    """One array in the text of a program.

    Args:
        dtype: as HLO names it.
        dims: its shape.
        in_hbm: whether it lies in the device's memory; otherwise in a memory of the core.
    """

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def bytes(self) -> int:
        """Of its numbers, without the padding of tiles."""
        return math.prod(self.dims) * _BITS.get(self.dtype, 32) // 8


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One operation.

    Args:
        name: without ``%``.
        kind: such as ``fusion`` or ``all-reduce-start``.
        arrays: of the result, a tuple's one by one.
        operands: names.
        line: the whole text.
        root: whether it is the result of its computation.
    """

    name: str
    kind: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    line: str
    root: bool

    def called(self) -> dict[str, list[str]]:
        """Computations that it names, by role."""
        found: dict[str, list[str]] = {}
        for role, names in _CALLED.findall(self.line):
            found.setdefault(role, []).extend(name.strip().lstrip("%") for name in names.split(",") if name.strip())
        return found

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(array.bytes for array in self.arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """An operation and how often it runs.

    Args:
        op: the operation.
        computation: it stands in.
        times: in a launch, loops without a known end counted once.
        in_step: whether it is inside such a loop.
    """

    op: Op
    computation: str
    times: int
    in_step: bool


class Hlo:
    """A parsed program.

    Args:
        text: ``compiled.as_text()``.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry = ""
        current: dict[str, Op] | None = None
        for line in text.splitlines():
            head = None if line.startswith(" ") else _HEAD.match(line)
            if head:
                current = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (op := _parse(line)) is not None:
                current[op.name] = op
        if not self.entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")

    @functools.cached_property
    def runs(self) -> list[Run]:
        """Every operation that runs on its own (not inside a fusion), with how often it does."""
        found: list[Run] = []

        def visit(name: str, times: int, in_step: bool) -> None:
            for op in self.computations.get(name, {}).values():
                found.append(Run(op=op, computation=name, times=times, in_step=in_step))
                called = op.called()
                if op.kind == "while":
                    turns = self.turns(name, op)
                    visit(called["body"][0], times * (turns or 1), in_step or turns is None)
                elif op.kind in ("conditional", "call", "async-start"):
                    for role in ("branch_computations", "called_computations", "to_apply", "calls"):
                        for branch in called.get(role, ()):
                            visit(branch, times, in_step)

        visit(self.entry, 1, False)
        return found

    def turns(self, computation: str, loop: Op) -> int | None:
        """How often a ``while`` turns, of a counter between constants; None where its end is not one."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
        if known:
            return int(known[1])
        called = loop.called()
        condition, body = (self.computations[called[role][0]] for role in ("condition", "body"))
        test = next(op for op in condition.values() if op.root)
        if test.kind != "compare" or "direction=LT" not in test.line:
            return None
        counter, end = (condition[name] for name in test.operands)
        last, index = _constant(end), _index(counter)
        if last is None or index is None:
            return None
        first, step = 0, 1
        start = self.computations[computation].get(loop.operands[0])
        if start is not None and start.kind == "tuple":
            begin = self.computations[computation].get(start.operands[index])
            first = _constant(begin) or 0 if begin is not None else 0
        root = next(op for op in body.values() if op.root)
        if root.kind == "tuple":
            change = body.get(root.operands[index])
            if change is not None and change.kind == "add":
                steps = [_constant(body[name]) for name in change.operands if name in body]
                step = next((value for value in steps if value), 1)
        return max(0, -(-(last - first) // step))

    def array_of(self, computation: str, name: str) -> tuple[Array, ...]:
        """The arrays of an operation's result."""
        op = self.computations[computation].get(name)
        return () if op is None else op.arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation.

    Args:
        name: of the operation.
        kind: such as ``all-reduce``.
        times: it runs in a launch; per step, where ``in_step``.
        in_step: whether it is inside the loop over steps.
        bytes: of its result on a device.
        groups: devices that exchange with each other, as positions in the program's order.
    """

    name: str
    kind: str
    times: int
    in_step: bool
    bytes: int
    groups: tuple[tuple[int, ...], ...]

    def crosses(self, owners: Sequence[int]) -> bool:
        """Whether a group has devices of different owners: processes, say, or replicas."""
        return any(len({owners[device] for device in group}) > 1 for group in self.groups)


def collectives(hlo: Hlo, devices: int) -> list[Collective]:
    """All collectives of a program over so many devices; those of an asynchronous pair count once."""
    found = []
    for run in hlo.runs:
        kind = run.op.kind.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        arrays = run.op.arrays[-1:] if run.op.kind.endswith("-start") and len(run.op.arrays) > 1 else run.op.arrays
        found.append(
            Collective(
                name=run.op.name,
                kind=kind,
                times=run.times,
                in_step=run.in_step,
                bytes=sum(array.bytes for array in arrays),
                groups=_groups(run.op.line, devices),
            )
        )
    return found


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
        if use is None:
            total += _hbm(arrays)
        elif _hbm(arrays):
            total += use[0]
            written -= sum(array.bytes for array in arrays) if use[1] else 0
    return total + max(0, written)


def _use(hlo: Hlo, computation: str, number: int) -> tuple[int, bool] | None:
    """Bytes that a computation moves of a parameter, and whether it updates it in place; None for all of it."""
    inside = hlo.computations[computation]
    users: dict[str, list[tuple[Op, int]]] = {}
    for each in inside.values():
        for place, operand in enumerate(each.operands):
            users.setdefault(operand, []).append((each, place))
    total, updated = 0, False
    todo = [each.name for each in inside.values() if f" parameter({number})" in each.line and each.kind == "parameter"]
    seen = False
    while todo:
        for user, place in users.get(todo.pop(), ()):
            seen = True
            if user.kind in ("bitcast", "copy", "reshape"):
                todo.append(user.name)
            elif user.kind in ("dynamic-slice", "slice", "gather") and place == 0:
                total += user.bytes
            elif user.kind in ("dynamic-update-slice", "scatter") and place == 0:
                total += 2 * inside[user.operands[1 if user.kind == "dynamic-update-slice" else 2]].bytes
                updated = True
            elif user.kind == "fusion" and (use := _use(hlo, user.called()["calls"][0], place)) is not None:
                total, updated = total + use[0], updated or use[1]
            else:
                return None
    return (total, updated) if seen else None


def _hbm(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if array.in_hbm)


def _parse(line: str) -> Op | None:
    text = line.strip()
    root = text.startswith("ROOT ")
    text = text.removeprefix("ROOT ")
    if not text.startswith("%") or " = " not in text:
        return None
    name, rest = text.split(" = ", 1)
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
    else:
        end = rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    inner = rest[opening + 1 : _closing(rest, opening)]
    return Op(
        name=name.lstrip("%"),
        kind=rest[:opening],
        arrays=tuple(
            Array(dtype, tuple(int(size) for size in dims.split(",") if size), "S(" not in layout)
            for dtype, dims, layout in _ARRAY.findall(shape)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", inner)),
        line=text,
        root=root,
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"a bracket is never closed: {text[opening:][:80]}")


def _constant(op: Op) -> int | None:
    found = re.search(r"constant\((-?\d+)\)", op.line) if op.kind == "constant" else None
    return int(found[1]) if found else None


def _index(op: Op) -> int | None:
    found = re.search(r"index=(\d+)", op.line) if op.kind == "get-tuple-element" else None
    return int(found[1]) if found else None


def _groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", line)
    if pairs:
        return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1]))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        over = re.findall(r"'([^']+)'", mesh[2])
        ids = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        ids = np.moveaxis(ids, [list(axes).index(name) for name in over], range(-len(over), 0))
        return _rows(ids.reshape(-1, math.prod(axes[name] for name in over)))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, source = ([int(size) for size in part.split(",")] for part in (iota[1], iota[2]))
        ids = np.arange(math.prod(source)).reshape(source)
        if iota[3]:
            ids = ids.transpose([int(axis) for axis in iota[3].split(",")])
        return _rows(ids.reshape(shape))
    listed = re.search(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", line)
    if listed:
        return tuple(tuple(int(d) for d in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    return (tuple(range(devices)),)


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(device) for device in row) for row in ids)


def copies(hlo: Hlo, dims: tuple[int, ...]) -> list[Op]:
    """Operations that make another array of these dimensions in memory: a second page pool, say."""
    kinds = ("copy", "copy-start", "transpose", "broadcast", "concatenate")
    return [
        run.op
        for run in hlo.runs
        if run.op.kind in kinds and any(array.dims == dims and array.in_hbm for array in run.op.arrays)
    ]
