"""The collectives of an optimised program: how often they run, what they move, between which devices."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from lockstep.xla.hlo import Hlo, Op, Run

_KINDS: Final = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation."""

    name: str
    kind: str  # the operation's kind, such as `all-reduce`
    times: int  # number of times that it runs in a launch; in a step, where `in_step`
    in_step: bool  # whether it is inside the loop over steps
    bytes: int  # bytes of its result on a device
    groups: tuple[tuple[int, ...], ...]  # devices that exchange, as positions in the program's order
    slices: int = 0  # number of slices that exchange over the data-centre network; 0 for what stays inside a slice

    def crosses(self, owners: Sequence[int]) -> bool:
        """Whether a group has devices of different owners."""
        return self.slices > 0 or any(len({owners[device] for device in group}) > 1 for group in self.groups)

    @property
    def devices(self) -> int:
        """The number of devices in the largest group; for a permutation, in all its pairs together."""
        if self.slices:
            return self.slices
        if self.kind == "collective-permute":
            return len({device for pair in self.groups for device in pair})
        return max(map(len, self.groups), default=1)

    @property
    def received(self) -> int:
        """The bytes that a device receives when the operation runs once, as a ring."""
        count = self.devices
        if self.kind == "all-reduce":
            return 2 * self.bytes * (count - 1) // count
        if self.kind == "reduce-scatter" or (self.slices and self.kind == "all-gather"):  # the bytes of a part
            return self.bytes * (count - 1)
        if self.kind in ("all-gather", "all-to-all"):
            return self.bytes * (count - 1) // count
        return self.bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSum:
    """The collectives of one kind that connect equally many devices, in one launch or in one of its steps."""

    kind: str
    count: int
    bytes: int  # bytes that a device receives in all of them
    devices: int  # number of devices that take part in one
    crosses_hosts: bool
    crosses_slices: bool = False


def collectives(hlo: Hlo, devices: int) -> list[Collective]:
    """All collectives of a program; an asynchronous pair counts once."""
    return [
        Collective(
            name=op.name,
            kind="reduce-scatter" if _scatters(run.op) else _kind(op),
            times=run.times,
            in_step=run.in_step,
            bytes=_result(run.op if _scatters(run.op) else op),
            groups=() if _crosses_slices(op) else _groups(op.line, devices),
            slices=_slices(op),
        )
        for run, op in _found(hlo)
    ]


def summed(collectives: Iterable[Collective], hosts: Sequence[int]) -> list[CollectiveSum]:
    """The sums of the collectives between at least two devices, by kind and size of group, most bytes first."""
    sums: dict[tuple[str, int, bool, bool], list[int]] = collections.defaultdict(lambda: [0, 0])
    for collective in collectives:
        if collective.times and (collective.slices or max(map(len, collective.groups), default=1) > 1):
            of_kind = sums[collective.kind, collective.devices, collective.crosses(hosts), collective.slices > 0]
            of_kind[0] += collective.times
            of_kind[1] += collective.times * collective.received
    return sorted(
        (
            CollectiveSum(
                kind=kind, count=count, bytes=size, devices=width, crosses_hosts=crosses, crosses_slices=slices
            )
            for (kind, width, crosses, slices), (count, size) in sums.items()
        ),
        key=lambda total: -total.bytes,
    )


def _found(hlo: Hlo) -> Iterator[tuple[Run, Op]]:
    """The collectives, each with its run; the compiler may put one into a fusion, or into both fusions of a pair."""
    fused: set[tuple[str, str]] = set()
    for run in hlo.runs:
        if run.op.kind.removesuffix("-start") in _KINDS or _crosses_slices(run.op):
            yield run, run.op
        elif run.op.kind == "fusion":
            for op in _inside(hlo, run.op):
                channel = re.search(r"channel_id=(\d+)", op.line)
                key = run.computation, channel[1] if channel else op.name
                if key not in fused:
                    fused.add(key)
                    yield run, op


def _inside(hlo: Hlo, fusion: Op) -> Iterator[Op]:
    for name in fusion.called().get("calls", ()):
        for op in hlo.computations.get(name, {}).values():
            if op.kind.removesuffix("-start") in _KINDS:
                yield op
            elif op.kind == "fusion":
                yield from _inside(hlo, op)


def _scatters(op: Op) -> bool:
    """Whether it is the TPU compiler's reduce-scatter: a kernel, written as a fusion of an all-reduce and a slice of it
    (https://openxla.org/xla/hlo_dumps).
    """
    return op.kind == "fusion" and any("all-reduce-scatter" in name for name in op.called().get("calls", ()))


def _crosses_slices(op: Op) -> bool:
    """Whether it hands an array to the runtime that exchanges it with other slices."""
    return op.kind == "send" and "xla_megascale_runtime" in op.line


def _kind(op: Op) -> str:
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', op.line)
    return match[1].lower().replace("_", "-") if match else op.kind.removesuffix("-start")


def _slices(op: Op) -> int:
    """The slices among which the runtime exchanges an array: ``{1,2}x{0:3}`` is two, with four devices each."""
    if not _crosses_slices(op):
        return 0
    match = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', op.line)
    ranges = [part.split(":") for part in match[1].split(",")] if match else []
    return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges) or 2


def _result(op: Op) -> int:
    """The bytes of the result; at the start of a pair, the operands come before it and scalars of its own after it."""
    if op.kind == "send":
        return op.arrays[0].bytes
    arrays = list(op.arrays)
    if op.kind.endswith("-start") and op.kind != "all-reduce-start":
        arrays = [array for array in arrays if array.dims] or arrays
        arrays = arrays[len(arrays) // 2 :]
    return sum(array.bytes for array in arrays)


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
