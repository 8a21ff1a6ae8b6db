"""The rows of a parameter in a checkpoint and on devices: each reads rows of its own, and programs move them.

A stored tensor is row-major, so that some of its rows are one range of bytes, while some of its columns are thousands.
All devices together read every row once, whatever the sharding; the columns are then exchanged between the devices. To
be saved, some rows at a time are gathered on every device.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.models.hf.names import HFTensor, Parameter
from lockstep.models.hf.saved_tensor import SavedTensor
from lockstep.placement import axes_of, mesh_of

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The rows of each stored tensor of a parameter that a device reads, and how they become the parameter."""

    mesh: Mesh
    dims: tuple[Axes, ...]  # the named axes that each dimension of a stored tensor has, the slowest first
    axes: tuple[tuple[str, int], ...]  # name and size of each axis of the parameter; the first may be `layer`
    split: tuple[Axes, ...]  # the axes of the mesh that split each axis of the parameter

    @classmethod
    def of(cls, parameter: Parameter, sharding: NamedSharding) -> Self:
        """Return the layout of a parameter that is to have a sharding."""
        assert isinstance(sharding.mesh, Mesh)
        spec = [*sharding.spec, *[None] * (parameter.value.ndim - len(sharding.spec))]
        return cls(
            mesh=sharding.mesh,
            dims=parameter.stored.dims,
            axes=tuple(parameter.sizes.items()),
            split=tuple(map(axes_of, spec)),
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
        """Return the stored rows, from and to, of which a device's padded rows from ``first`` to ``last`` consist.

        Args:
            first: The first row of the device, as `sharding` has it.
            last: The row after its last one.
        """
        part_rows = self._stored_shape[0] // self._count(self._stored_split[0])
        part, offset = divmod(first, self._padded(part_rows))
        start, stop = (min(row, part_rows) for row in (offset, offset + last - first))
        return part * part_rows + start, part * part_rows + stop

    def move(self, rows: jax.Array) -> jax.Array:
        """Move the rows that were read to where the parameter is; a function to be traced.

        Beside the rows and the result, a device holds what the collectives need: where all axes of the mesh split the
        parameter, as much as the rows.
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
        block = block[:, : local[self.dims[0][0]] * math.prod(sizes[name] for name in self.dims[0][1:])]
        stored = HFTensor("", self.dims)
        result: Any = jax.vmap(lambda layer: stored.from_stored(layer, names, local))(block)
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


MAX_READERS = 32
"""The most hosts that read a checkpoint. Each makes a request or more for its rows of every tensor, so that with 256 of
them a bucket gets tens of thousands for the few objects of a model, and answers 429 or slowly."""


@dataclasses.dataclass(frozen=True)
class ReadingHosts:
    """Groups of hosts of which the first reads for all; one program then hands each device its rows."""

    mesh: Mesh  # the devices as `(group, host, device)`; only hosts that are 0 on the second axis read

    @classmethod
    def of(cls, mesh: Mesh, most: int | None = None) -> Self | None:
        """The groups of a mesh, at most ``most`` (None: `MAX_READERS`); None where every host reads.

        That is where there are at most ``most`` hosts, or they differ in their number of devices, or their number has
        no divisor (a prime, say) of which at least a quarter of ``most`` could read.
        """
        most = MAX_READERS if most is None else most
        by_host: dict[int, list[jax.Device]] = {}
        for device in mesh.devices.flat:
            by_host.setdefault(device.process_index, []).append(device)
        rows = [by_host[process] for process in sorted(by_host)]
        readers = max(count for count in range(1, most + 1) if len(rows) % count == 0)
        if len(rows) <= most or len({len(row) for row in rows}) > 1 or 4 * readers < most:
            return None
        devices = np.empty((len(rows), len(rows[0])), object)
        devices[:] = rows
        return cls(Mesh(devices.reshape(readers, -1, len(rows[0])), ("group", "host", "device")))

    @property
    def hosts(self) -> int:
        """The number of hosts of a group."""
        return int(self.mesh.shape["host"])

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of rows, one block of equal size on each device."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.mesh.axis_names))

    def served(self, device: jax.Device) -> list[jax.Device]:
        """The devices whose rows a device reads, one of each host of its group; none where its host does not read."""
        group, host, number = self._places[device]
        return [] if host else list(self.mesh.devices[group, :, number])

    @functools.cached_property
    def _places(self) -> dict[jax.Device, tuple[int, ...]]:
        return {self.mesh.devices[place]: place for place in np.ndindex(self.mesh.devices.shape)}

    def spread(self, rows: jax.Array) -> jax.Array:
        """Hand the devices of a group their rows; a function to be traced.

        Args:
            rows: They have `sharding`; a reading device has those of its `served` devices one after the other.
        """

        def hand_over(block: jax.Array) -> jax.Array:
            received = jax.lax.all_to_all(block, "host", split_axis=1, concat_axis=1, tiled=True)
            return jax.lax.slice_in_dim(received, 0, block.shape[1] // self.hosts, axis=1)  # from the first host

        spec = self.sharding.spec
        return jax.shard_map(hand_over, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGather:
    """A program that gives every device the same entries of a parameter's row axis, as they are stored.

    A device holds, beside the parameter, a few times as much as the result, however large the tensor is.
    """

    layout: RowLayout  # the axes of the parameter, how the mesh splits them, and how they are stored
    row_axis: str  # the axis that is gathered in part
    count: int  # number of its entries
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, tensor: SavedTensor, most_bytes: int) -> Self:
        """Return the program for the pieces of a tensor."""
        return cls(
            layout=RowLayout.of(tensor.parameter, sharding_of(tensor.parameter)),
            row_axis=tensor.row_axis,
            count=tensor.rows_in(most_bytes),
            dtype=tensor.dtype,
        )

    @property
    def mesh(self) -> Mesh:
        """The mesh of the parameter."""
        return self.layout.mesh

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of the second argument and of the result."""
        return NamedSharding(self.mesh, PartitionSpec())

    def gather(self, array: jax.Array, where: jax.Array) -> jax.Array:
        """Gather the stored rows ``[row, ...]``, replicated; a function to be traced.

        Args:
            where: ``int32[2]``: the layer, and the first entry of the row axis. Entries beyond the last are zeros.
        """
        spec = self.layout.target.spec
        gathered = jax.shard_map(
            self._gather, mesh=self.mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
        )
        return gathered(array, where)

    def _gather(self, block: jax.Array, where: jax.Array) -> jax.Array:
        names = [name for name, _ in self.layout.axes]
        split = dict(zip(names, self.layout.split, strict=True))
        axis = names.index(self.row_axis)
        is_owner, layer = jnp.asarray(True), None
        if "layer" in split:
            part, layer = divmod(where[0], block.shape[0])
            is_owner = part == _index(split["layer"])
        block = self._window(block, layer, axis, where[1], split[self.row_axis]).astype(self.dtype)
        if owners := (*split.get("layer", ()), *split[self.row_axis]):
            block = _sum_exactly(jnp.where(is_owner, block, 0), owners)
        for dim, name in enumerate(names):
            if name not in ("layer", self.row_axis) and split[name]:
                block = jax.lax.all_gather(block, split[name], axis=dim, tiled=True)
        if "layer" in split:
            block, names = block[0], names[1:]
        flat = [name for group in self.layout.dims for name in group]
        sizes = dict(self.layout.axes) | {self.row_axis: self.count}
        shape = [math.prod(sizes[name] for name in group) for group in self.layout.dims]
        return block.transpose([names.index(name) for name in flat]).reshape(shape)

    def _window(
        self, block: jax.Array, layer: jax.Array | None, axis: int, start: jax.Array, axes: tuple[str, ...]
    ) -> jax.Array:
        """Return ``count`` entries of a layer from ``start`` on, zeros in place of those that another device has."""
        size = block.shape[axis]
        most = min(size, self.count)
        first = _index(axes) * size
        begin = jnp.clip(start - first, 0, size - most)  # of what is taken of this device's block
        starts: list[Any] = [0] * block.ndim
        sizes = list(block.shape)
        starts[axis], sizes[axis] = begin, most
        if layer is not None:
            starts[0], sizes[0] = layer, 1
        taken = jax.lax.dynamic_slice(block, starts, sizes)
        # Taken entries that are outside the window fall on the margins.
        sizes[axis] = self.count + 2 * most
        offset = jnp.clip(most + begin + first - start, 0, self.count + most)
        wide = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(sizes, block.dtype), taken, offset, axis)
        return jax.lax.slice_in_dim(wide, most, most + self.count, axis=axis)


def sharding_of(parameter: Parameter) -> NamedSharding:
    """Return the sharding of a model's parameter; on one device, one over a mesh of it."""
    array = parameter.value.array
    if isinstance(array.sharding, NamedSharding):
        return array.sharding
    return NamedSharding(mesh_of(array), PartitionSpec())


def _index(axes: tuple[str, ...]) -> Any:
    """The number of this device's part along some axes of the mesh."""
    return jax.lax.axis_index(axes) if axes else 0


def _sum_exactly(values: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Add values of which all but one device have zeros, as bits: a sum of floats would turn -0.0 into 0.0."""
    unsigned = jnp.dtype(f"uint{8 * values.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(values, unsigned).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(jax.lax.psum(bits, axes).astype(unsigned), values.dtype)
