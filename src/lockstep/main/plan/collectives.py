"""The collectives of an optimised program: how often they run, what they move, between which devices."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import haliax as hax
import jax
import numpy as np
from jaxtyping import PyTree

from lockstep.main.plan.hlo import Hlo, Op, Run
from lockstep.models import split_trained
from lockstep.placement import CP, PARAMETER_AXES, PP

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
            kind=_kind(op),
            times=run.times,
            in_step=run.in_step,
            bytes=_result(op),
            groups=() if _crosses_slices(op) else _groups(op.line, devices),
            slices=_slices(op),
        )
        for run, op in _found(hlo)
    ]


def summed(found: Iterable[Collective], hosts: Sequence[int]) -> list[CollectiveSum]:
    """The sums of the collectives between at least two devices, by kind and size of group, most bytes first."""
    sums: dict[tuple[str, int, bool, bool], list[int]] = collections.defaultdict(lambda: [0, 0])
    for one in found:
        if one.times and (one.slices or max(map(len, one.groups), default=1) > 1):
            of_kind = sums[one.kind, one.devices, one.crosses(hosts), one.slices > 0]
            of_kind[0] += one.times
            of_kind[1] += one.times * one.received
    return sorted(
        (
            CollectiveSum(
                kind=kind, count=count, bytes=size, devices=width, crosses_hosts=crosses, crosses_slices=slices
            )
            for (kind, width, crosses, slices), (count, size) in sums.items()
        ),
        key=lambda one: -one.bytes,
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


def _crosses_slices(op: Op) -> bool:
    """Whether it hands an array to the runtime that exchanges it with other slices."""
    return op.kind == "send" and "xla_megascale_runtime" in op.line


def _kind(op: Op) -> str:
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', op.line)
    return found[1].lower().replace("_", "-") if found else op.kind.removesuffix("-start")


def _slices(op: Op) -> int:
    """The slices among which the runtime exchanges an array: ``{1,2}x{0:3}`` is two, with four devices each."""
    if not _crosses_slices(op):
        return 0
    found = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', op.line)
    ranges = [part.split(":") for part in found[1].split(",")] if found else []
    return sum(int(each[-1]) - int(each[0]) + 1 for each in ranges) or 2


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


TILE: Final = (16, 128)
"""The rows and columns of a TPU's tile of 16-bit numbers, the type that weights are gathered in.

Source: https://docs.jax.dev/en/latest/pallas/tpu/details.html
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThinPieces:
    """A weight whose pieces fill only a part of a TPU's tile."""

    parameter: str  # the path of the weight
    axis: str
    size: int  # the size of the axis
    piece: int  # the size of a device's piece of it
    tile: int  # the size of a tile along it


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpBytes:
    """The bytes that a device receives in a train step for parameters and gradients."""

    floor: int  # the least that FSDP has to receive, see `fsdp_floor`
    received: int  # what the program receives in collectives between data-parallel devices, whatever they are for
    thin: tuple[ThinPieces, ...] = ()  # the weights that are split into pieces thinner than a tile

    @property
    def ratio(self) -> float | None:
        """The bytes received, over the least that must be; None where nothing has to be."""
        return self.received / self.floor if self.floor else None


def fsdp_bytes(
    model: PyTree,
    mesh_shape: Mapping[str, int],
    found: Iterable[Collective],
    *,
    microbatches: int,
    itemsize: int,
    bubble: float = 0.0,
) -> FsdpBytes:
    """Compare the collectives of a train step with what FSDP needs."""
    # The mesh's last axis is the one that changes fastest between the positions of devices. Those that share a row
    # exchange keys and values.
    tp, row = mesh_shape["tp"], mesh_shape["tp"] * mesh_shape.get(CP, 1)

    def between_data(group: Sequence[int]) -> bool:
        return len({place % tp for place in group}) == 1 and (row == tp or len({place // row for place in group}) > 1)

    received = sum(one.times * one.received for one in found if not one.slices and all(map(between_data, one.groups)))
    return FsdpBytes(
        floor=fsdp_floor(model, mesh_shape, microbatches=microbatches, itemsize=itemsize, bubble=bubble),
        received=received,
        thin=thin_pieces(model, mesh_shape),
    )


def fsdp_floor(
    model: PyTree, mesh_shape: Mapping[str, int], *, microbatches: int, itemsize: int, bubble: float = 0.0
) -> int:
    """The least bytes that a device receives in a train step for parameters and gradients.

    For each microbatch and in the compute type: the weights of each layer are gathered for the forward pass, dropped,
    and gathered again for the backward pass (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2.2); other weights
    are gathered once; gradients, which frozen weights do not have, are summed while they are scattered, each once.
    Gathering or scattering an array of B bytes on n devices receives B (n - 1) / n. Where there are replicas
    (``dp``), what a device has of the gradients is summed over them once per step. A table that is only looked up, next
    to an output layer, stays where it is: devices exchange the columns of the tokens' rows, which is not counted.

    Args:
        model: The parameters as haliax arrays, or their shapes, those of a `LoraModel` that are frozen too.
        mesh_shape: The size of each axis of the mesh, by name.
        microbatches: The number of parts of a batch that are computed one after the other. With stages a device gathers
            its own layers, in each step of the schedule, and other weights once.
        itemsize: The bytes of a number in the compute type.
        bubble: The share of those steps in which a stage has no microbatch.
    """
    total = 0.0
    trained, frozen = split_trained(model)
    parameters = [(axes, 1) for _, axes in _parameters(trained)] + [(axes, 0) for _, axes in _parameters(frozen)]
    tables = [each for each in parameters if {axis.name for axis in each[0]} == {"vocab", "embed"}]
    if len(tables) > 1:
        parameters.remove(tables[0])
    for axes, gradients in parameters:
        split = {PARAMETER_AXES.get(axis.name) for axis in axes}
        size = itemsize * hax.axis.axis_size(axes) / (mesh_shape["tp"] if "tp" in split else 1)
        devices = mesh_shape["fsdp"] if "fsdp" in split else 1
        layers, stages = any(axis.name == "layer" for axis in axes), mesh_shape.get(PP, 1)
        gathers, times = 2 if layers else 1, float(microbatches)
        if stages > 1:
            size, times = (size / stages, microbatches / (1 - bubble)) if layers else (size, 1)
        total += times * (gathers + gradients) * size * (devices - 1) / devices
        total += gradients * _all_reduce(size / devices, mesh_shape["dp"])
        if devices == 1:  # whole on every device: its gradient is summed over all of them
            total += gradients * _all_reduce(size, mesh_shape["fsdp"])
    return round(total)


def thin_pieces(model: PyTree, mesh_shape: Mapping[str, int]) -> tuple[ThinPieces, ...]:
    """The weights of which FSDP gives each device a piece thinner than a tile.

    A TPU stores an array in whole tiles of its last two axes, so that such a piece is stored, gathered and scattered
    with padding. Vectors are not named: they are next to nothing.
    """
    found = []
    for path, axes in _parameters(model):
        if sum(axis.name != "layer" for axis in axes) < 2:
            continue
        for axis, tile in zip(axes[-2:], TILE, strict=True):
            devices = mesh_shape["fsdp"] if PARAMETER_AXES.get(axis.name) == "fsdp" else 1
            piece = axis.size // devices
            if devices > 1 and piece < tile:
                found.append(ThinPieces(parameter=path, axis=axis.name, size=axis.size, piece=piece, tile=tile))
    return tuple(found)


def _all_reduce(size: float, devices: int) -> float:
    return 2 * size * (devices - 1) / devices


def _parameters(model: PyTree) -> list[tuple[str, tuple[hax.Axis, ...]]]:
    """The path and the axes of every parameter."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
    return [
        (jax.tree_util.keystr(path).removeprefix("."), leaf.axes)
        for path, leaf in leaves
        if isinstance(leaf, hax.NamedArray)
    ]
