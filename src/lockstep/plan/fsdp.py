"""Bytes that a train step receives for parameters and gradients, and the least that FSDP needs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import haliax as hax
import jax
from jaxtyping import PyTree

from lockstep.models import split_trained
from lockstep.placement import CP, PARAMETER_AXES, PP
from lockstep.xla import Collective

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
    exchanged: Iterable[Collective],
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

    received = sum(
        collective.times * collective.received
        for collective in exchanged
        if not collective.slices and all(map(between_data, collective.groups))
    )
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
    tables = [parameter for parameter in parameters if {axis.name for axis in parameter[0]} == {"vocab", "embed"}]
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
    pieces = []
    for path, axes in _parameters(model):
        if sum(axis.name != "layer" for axis in axes) < 2:
            continue
        for axis, tile in zip(axes[-2:], TILE, strict=True):
            devices = mesh_shape["fsdp"] if PARAMETER_AXES.get(axis.name) == "fsdp" else 1
            piece = axis.size // devices
            if devices > 1 and piece < tile:
                pieces.append(ThinPieces(parameter=path, axis=axis.name, size=axis.size, piece=piece, tile=tile))
    return tuple(pieces)


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
