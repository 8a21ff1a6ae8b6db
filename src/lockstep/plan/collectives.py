"""Collectives of a compiled program: how often, how much, between which devices. Loops are counted as they turn."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

_ITEM: Final = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8,
}  # fmt: skip
_KINDS: Final = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OP: Final = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?[}\])]) ([\w\-]+)\(")
_SHAPE: Final = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALLED: Final = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_CONSTANT: Final = re.compile(r"= [su]32\[\][^=]* constant\((\d+)\)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind in one run of a program, or in one turn of its loop without a fixed end.

    Args:
        kind: such as ``all-reduce``.
        count: how often.
        bytes: that a device receives, in all.
        devices: that take part in one.
        crosses_hosts: whether any of them is between hosts.
    """

    kind: str
    count: int
    bytes: int
    devices: int
    crosses_hosts: bool


def collectives(text: str, hosts: Sequence[int]) -> list[Collective]:
    """Read the collectives off an optimised program.

    Args:
        text: as the compiler prints it.
        hosts: process of each device, in the order of the program's devices.

    Returns:
        One entry per kind, number of devices and crossing, most bytes first. A loop counts as often as it turns; one
        whose end is an argument, such as the steps of decode, counts once.
    """
    bodies, entry = _computations(text)
    turns = _turns(bodies, entry)
    sums: dict[tuple[str, int, bool], list[int]] = collections.defaultdict(lambda: [0, 0])
    for name, times in turns.items():
        for line in bodies.get(name, ()):
            found = _OP.match(line)
            if found is None:
                continue
            kind = found[3].removesuffix("-start")
            if kind not in _KINDS or not times:
                continue
            groups = _groups(line, len(hosts))
            width = max((len(group) for group in groups), default=1)
            if width < 2:
                continue
            crosses = any(len({hosts[device] for device in group}) > 1 for group in groups)
            if kind == "collective-permute":
                width = len({device for group in groups for device in group})
            entry_ = sums[kind, width, crosses]
            entry_[0] += times
            entry_[1] += times * _received(found[3], found[2], width)
    return sorted(
        (
            Collective(kind=kind, count=count, bytes=size, devices=width, crosses_hosts=crosses)
            for (kind, width, crosses), (count, size) in sums.items()
        ),
        key=lambda one: -one.bytes,
    )


def vmem(text: str) -> int:
    """Bytes of vector memory of the hungriest operation of an optimised TPU program."""
    found = re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', text)
    return max(map(int, found), default=0)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and not line.startswith(" "):
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return bodies, entry


def _turns(bodies: Mapping[str, Sequence[str]], entry: str) -> dict[str, int]:
    """How often each computation runs."""
    runs: dict[str, int] = collections.defaultdict(int)

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for line in bodies.get(name, ()):
            names = [each.strip().lstrip("%") for group in _CALLED.findall(line) for each in group.split(",")]
            loop = re.search(r"condition=%([\w.\-]+), body=%([\w.\-]+)", line)
            for called in names:
                if called in bodies:
                    many = _trips(bodies, loop[1], line) if loop and called == loop[2] else 1
                    visit(called, times * many)

    visit(entry, 1)
    return runs


def _trips(bodies: Mapping[str, Sequence[str]], condition: str, line: str) -> int:
    """Turns of a loop: as the compiler says, else the constant in its condition; 1 where the end is an argument."""
    known = re.search(r"known_trip_count[^\d]*(\d+)", line)
    if known:
        return int(known[1])
    constants: list[int] = []
    seen, todo = set(), [condition]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for inner in bodies.get(name, ()):
            constants += [int(value) for value in _CONSTANT.findall(inner)]
            todo += [each.strip().lstrip("%") for group in _CALLED.findall(inner) for each in group.split(",")]
    return max([value for value in constants if value > 0], default=1)


def _groups(line: str, devices: int) -> list[list[int]]:
    """Devices that exchange with each other, as positions in the program's order."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", line)
    if pairs:
        return [[int(a), int(b)] for a, b in re.findall(r"(\d+),(\d+)", pairs[1])]
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        over = re.findall(r"'([^']+)'", mesh[2])
        ids = np.arange(math.prod(axes.values())).reshape(list(axes.values()))
        places = [list(axes).index(name) for name in over]
        moved = np.moveaxis(ids, places, range(-len(places), 0))
        return [list(map(int, row)) for row in moved.reshape(-1, math.prod(axes[name] for name in over))]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, source = ([int(x) for x in part.split(",")] for part in (iota[1], iota[2]))
        ids = np.arange(math.prod(source)).reshape(source)
        if iota[3]:
            ids = ids.transpose([int(x) for x in iota[3].split(",")])
        return [list(map(int, row)) for row in ids.reshape(shape)]
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed:
        return [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    return [list(range(devices))]


def _received(operation: str, shape: str, width: int) -> int:
    """Bytes that one device receives."""
    kind = operation.removesuffix("-start")
    sizes = [
        _ITEM.get(dtype, 4) * math.prod(int(x) for x in dims.split(",") if x) for dtype, dims in _SHAPE.findall(shape)
    ]
    if operation.endswith("-start") and kind != "all-reduce":
        # Operands, then results, then whatever the start hands to the end.
        sizes = [size for size in sizes if size > 4] or sizes
        sizes = sizes[len(sizes) // 2 :]
    total = sum(sizes)
    if kind == "all-reduce":
        return 2 * total * (width - 1) // width
    if kind == "reduce-scatter":
        return total * (width - 1)
    if kind in ("all-gather", "all-to-all"):
        return total * (width - 1) // width
    return total
