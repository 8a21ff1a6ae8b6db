"""Arrays that are split over devices, gathered; their gradients are scattered while they are summed."""

from collections.abc import Sequence
from typing import Final

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from lockstep.placement.device.chips import chip_of
from lockstep.placement.device.platforms import platform_of
from lockstep.placement.mesh import DCN

NEIGHBOURS: Final = 4
"""The chips of a host of a TPU slice, which a mesh has one after the other."""


def gather(part: Shaped[Array, "..."], name: str, axis: int, *, neighbours: int | None = None) -> Shaped[Array, "..."]:
    """Return the whole of an array, inside a ``shard_map``; its gradient is scattered while it is summed.

    The TPU compiler makes an all-reduce of a sum that is scattered over all chips of a slice, of which a device
    receives twice as much as of the two reduce-scatters here (ADR 17).

    Args:
        name: The mesh axis that splits the array.
        axis: The axis of the array.
        neighbours: The devices, one after the other on the mesh axis, that exchange what they have before all others
            do; 1 for one exchange among all. None: as the compiler of the devices needs.
    """
    for groups in _exchanges(name, neighbours):
        part = jax.lax.all_gather(part, name, axis=axis, tiled=True, axis_index_groups=groups)
    return part


def gather_tokens(mesh: Mesh, itemsize: int) -> float:
    """Return the tokens of a device with which its products take as long as FSDP's gather of their weights.

    By published numbers of the chip: two operations for a token and a weight; 0 where no weight is gathered.

    Args:
        itemsize: The bytes of a weight as it is gathered.
    """
    if mesh.shape["fsdp"] == 1:
        return 0.0
    devices = list(mesh.devices.flat)
    chip, processes = chip_of(devices[0]), {device.process_index for device in devices}
    link = chip.network if len(processes) > mesh.shape["dp"] else chip.link
    return chip.flops / 2 * itemsize / link.bandwidth


def _exchanges(name: str, neighbours: int | None) -> Sequence[list[list[int]] | None]:
    mesh = jax.sharding.get_abstract_mesh()
    size, in_slice = mesh.shape[name], mesh.size // mesh.shape.get(DCN, 1)
    if neighbours is None:
        device = mesh.abstract_device
        in_two = device is not None and platform_of(device.platform).reduces_all and size == in_slice
        neighbours = NEIGHBOURS if in_two else 1
    if neighbours == 1 or size <= neighbours or size % neighbours:
        return [None]
    near = [list(range(first, first + neighbours)) for first in range(0, size, neighbours)]
    return near, [list(range(first, size, neighbours)) for first in range(neighbours)]
