"""Some rows of one stored tensor on every device, from a parameter in any sharding: what a host writes at a time."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.models.hf.names import Parameter
from lockstep.models.hf.row_layout import RowLayout
from lockstep.models.hf.save_plan import SavedTensor
from lockstep.placement import mesh_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGather:
    """A program that gives every device the same entries of a parameter's row axis, as they are stored.

    A device holds, beside the parameter, a few times as much as the result, however large the tensor is.

    Args:
        layout: The axes of the parameter, how the mesh splits them, and how they are stored.
        row_axis: The axis that is gathered in part.
        count: The number of its entries.
        dtype: The dtype of the result.
    """

    layout: RowLayout
    row_axis: str
    count: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, tensor: SavedTensor, most_bytes: int) -> Self:
        """Returns the program for the pieces of a tensor.

        Args:
            tensor: A tensor of a model's array.
            most_bytes: The most bytes of a piece.
        """
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
        """Gathers the rows; a function to be traced.

        Args:
            array: The parameter.
            where: ``int32[2]``: the layer, and the first entry of the row axis. Entries beyond the last are zeros.

        Returns:
            The stored rows ``[row, ...]``, replicated.
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
        here, layer = jnp.asarray(True), None
        if "layer" in split:
            part, layer = divmod(where[0], block.shape[0])
            here = part == _index(split["layer"])
        block = self._window(block, layer, axis, where[1], split[self.row_axis]).astype(self.dtype)
        if owners := (*split.get("layer", ()), *split[self.row_axis]):
            block = _sum_exactly(jnp.where(here, block, 0), owners)
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
        """Returns ``count`` entries of a layer from ``start`` on, zeros in place of those that another device has."""
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
    """Returns the sharding of a model's parameter; on one device, one over a mesh of it."""
    array = parameter.value.array
    if isinstance(array.sharding, NamedSharding):
        return array.sharding
    return NamedSharding(mesh_of(array), PartitionSpec())


def _index(axes: tuple[str, ...]) -> Any:
    """The number of this device's part along some axes of the mesh."""
    return jax.lax.axis_index(axes) if axes else 0


def _sum_exactly(values: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Adds values of which all but one device have zeros, as bits: a sum of floats would turn -0.0 into 0.0."""
    unsigned = jnp.dtype(f"uint{8 * values.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(values, unsigned).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(jax.lax.psum(bits, axes).astype(unsigned), values.dtype)
