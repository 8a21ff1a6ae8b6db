"""How a parameter gets from a checkpoint to its devices: each reads rows of its own, then one program moves them.

A stored tensor is row-major, so that some of its rows are one range of bytes, while some of its columns are thousands.
All devices together read every row once, whatever the sharding; the columns are then exchanged between the devices.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.models.hf.names import HFTensor, Parameter

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The rows of each stored tensor of a parameter that a device reads, and how they become the parameter.

    Args:
        mesh: The mesh of the model.
        dims: The named axes that each dimension of a stored tensor has, the slowest first.
        axes: The name and size of each axis of the parameter, in order; the first may be ``layer``.
        split: The axes of the mesh that split each axis of the parameter.
    """

    mesh: Mesh
    dims: tuple[Axes, ...]
    axes: tuple[tuple[str, int], ...]
    split: tuple[Axes, ...]

    @classmethod
    def of(cls, parameter: Parameter, sharding: NamedSharding) -> Self:
        """Returns the layout of a parameter that is to have a sharding."""
        assert isinstance(sharding.mesh, Mesh)
        spec = [*sharding.spec, *[None] * (parameter.value.ndim - len(sharding.spec))]
        return cls(
            mesh=sharding.mesh,
            dims=parameter.stored.dims,
            axes=tuple(parameter.sizes.items()),
            split=tuple(_mesh_axes(entry) for entry in spec),
        )

    @property
    def target(self) -> NamedSharding:
        """The sharding of the parameter."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in self.split)))

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the rows that were read."""
        rows = (*self._stored_split[0], *self._moved)
        return NamedSharding(self.mesh, PartitionSpec(None, rows or None))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows that were read: ``[layer, row, *columns]``, the rows padded to a multiple."""
        rows, *columns = self._stored_shape
        parts = self._count(self._stored_split[0])
        return (self._sizes.get("layer", 1), parts * self._padded(rows // parts), *columns)

    def rows(self, first: int, last: int) -> tuple[int, int]:
        """Returns the stored rows, from and to, of which a device's padded rows from ``first`` to ``last`` consist.

        Args:
            first: The first row of the device, as `sharding` has it.
            last: The row after its last one.
        """
        part_rows = self._stored_shape[0] // self._count(self._stored_split[0])
        part, offset = divmod(first, self._padded(part_rows))
        start, stop = (min(row, part_rows) for row in (offset, offset + last - first))
        return part * part_rows + start, part * part_rows + stop

    def move(self, rows: jax.Array) -> jax.Array:
        """Moves the rows that were read to where the parameter is; a function to be traced.

        Beside the rows and the result, a device holds what the collectives need: where all axes of the mesh split the
        parameter, as much as the rows.

        Args:
            rows: The rows, of `shape` and `sharding`.
        """
        moved = jax.shard_map(
            self._move, mesh=self.mesh, in_specs=self.sharding.spec, out_specs=self.target.spec, check_vma=False
        )
        return moved(rows)

    def _move(self, block: jax.Array) -> jax.Array:
        for dim in reversed(range(1, len(self.dims))):
            if self._count(axes := self._stored_split[dim]) > 1:
                block = jax.lax.all_to_all(block, axes, split_axis=dim + 1, concat_axis=1, tiled=True)
        if self._count(self._rest) > 1:
            block = jax.lax.all_gather(block, self._rest, axis=1, tiled=True)
        sizes, names = self._sizes, [name for name, _ in self.axes if name != "layer"]
        slowest = {group[0]: axes for group, axes in zip(self.dims, self._stored_split, strict=True)}
        local = {name: size // self._count(slowest.get(name, ())) for name, size in sizes.items()}
        where = {name: slice(0, size) for name, size in local.items()}
        block = block[:, : local[self.dims[0][0]] * math.prod(sizes[name] for name in self.dims[0][1:])]
        stored = HFTensor("", self.dims)
        result: Any = jax.vmap(lambda one: stored.from_stored(one, where, names, sizes))(block)
        result = result if "layer" in sizes else result[0]
        for dim, ((name, size), axes) in enumerate(zip(self.axes, self.split, strict=True)):
            if name not in slowest and (count := self._count(axes)) > 1:
                own = jax.lax.axis_index(axes) * (size // count)
                result = jax.lax.dynamic_slice_in_dim(result, own, size // count, axis=dim)
        return result

    @property
    def _sizes(self) -> Mapping[str, int]:
        return dict(self.axes)

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        return HFTensor("", self.dims).shape(self._sizes)

    @property
    def _stored_split(self) -> tuple[Axes, ...]:
        """The axes of the mesh that split each dimension of the stored tensor: those of its slowest axis."""
        split = {name: axes for (name, _), axes in zip(self.axes, self.split, strict=True)}
        return tuple(split[group[0]] for group in self.dims)

    @property
    def _rest(self) -> Axes:
        """The axes of the mesh that split no dimension of the stored tensor: their devices share what they read."""
        used = {axis for axes in self._stored_split for axis in axes}
        return tuple(axis for axis in self.mesh.axis_names if axis not in used)

    @property
    def _moved(self) -> Axes:
        """The axes of the mesh that split the rows when they are read, and not in the end."""
        return (*self._rest, *(axis for axes in self._stored_split[1:] for axis in axes))

    def _padded(self, rows: int) -> int:
        """The least multiple of the devices that share these rows."""
        count = self._count(self._moved)
        return -(-rows // count) * count

    def _count(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def _mesh_axes(entry: str | Sequence[str] | None) -> Axes:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
