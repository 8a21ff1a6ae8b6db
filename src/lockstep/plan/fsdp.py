"""What fully sharded data parallelism has to move between devices in a train step, and what a program moves."""

import dataclasses
from collections.abc import Iterable, Mapping

import haliax as hax
import jax
from jaxtyping import PyTree

from lockstep.models import split_trained
from lockstep.placement import PARAMETER_AXES
from lockstep.plan.collectives import Collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpBytes:
    """The bytes that a device receives in a train step for parameters and gradients.

    Args:
        floor: The least that FSDP has to receive, see `fsdp_floor`.
        received: What the program receives in collectives between data-parallel devices, whatever they are for.
    """

    floor: int
    received: int

    @property
    def ratio(self) -> float | None:
        """What is received over the least; None where nothing has to be."""
        return self.received / self.floor if self.floor else None


def fsdp_bytes(
    model: PyTree, mesh_shape: Mapping[str, int], found: Iterable[Collective], *, microbatches: int, itemsize: int
) -> FsdpBytes:
    """Compare the collectives of a train step with what FSDP needs.

    Args:
        model: The parameters as haliax arrays, or their shapes.
        mesh_shape: The size of each axis of the mesh, in its order: ``dp``, ``fsdp``, ``tp``.
        found: The collectives of the step.
        microbatches: The number of parts of a batch that are computed one after the other.
        itemsize: The bytes of a number in the compute type.
    """
    tp = mesh_shape["tp"]
    # The mesh's last axis is the one that changes fastest between the positions of devices.
    between_data = (one for one in found if all(len({place % tp for place in group}) == 1 for group in one.groups))
    return FsdpBytes(
        floor=fsdp_floor(model, mesh_shape, microbatches=microbatches, itemsize=itemsize),
        received=sum(one.times * one.received for one in between_data),
    )


def fsdp_floor(model: PyTree, mesh_shape: Mapping[str, int], *, microbatches: int, itemsize: int) -> int:
    """The least bytes that a device receives in a train step for parameters and gradients.

    For each microbatch and in the compute type: the weights of each layer are gathered for the forward pass, dropped,
    and gathered again for the backward pass (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2.2); other weights
    are gathered once; gradients, which frozen weights do not have, are summed while they are scattered, each once. Of
    an array of B bytes on n devices, gathering and scattering receive B (n - 1) / n each. Where there are replicas
    (``dp``), what a device has of the gradients is summed over them once per step.

    Args:
        model: The parameters as haliax arrays, or their shapes, those of a `LoraModel` that are frozen too.
        mesh_shape: The size of each axis of the mesh, by name.
        microbatches: The number of parts of a batch that are computed one after the other.
        itemsize: The bytes of a number in the compute type.
    """
    total = 0.0
    trained, frozen = split_trained(model)
    for axes, gradients in [(axes, 1) for axes in _parameters(trained)] + [(axes, 0) for axes in _parameters(frozen)]:
        split = {PARAMETER_AXES.get(axis.name) for axis in axes}
        size = itemsize * hax.axis.axis_size(axes) / (mesh_shape["tp"] if "tp" in split else 1)
        devices = mesh_shape["fsdp"] if "fsdp" in split else 1
        gathers = 2 if any(axis.name == "layer" for axis in axes) else 1
        total += microbatches * (gathers + gradients) * size * (devices - 1) / devices
        total += gradients * _all_reduce(size / devices, mesh_shape["dp"])
        if devices == 1:  # whole on every device: its gradient is summed over all of them
            total += gradients * _all_reduce(size, mesh_shape["fsdp"])
    return round(total)


def _all_reduce(size: float, devices: int) -> float:
    return 2 * size * (devices - 1) / devices


def _parameters(model: PyTree) -> list[tuple[hax.Axis, ...]]:
    """The axes of every parameter."""
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
    return [leaf.axes for leaf in leaves if isinstance(leaf, hax.NamedArray)]
