"""The decode grid: the trainer's devices, in the trainer's order, seen as (replica × tensor)."""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeGrid:
    """A mesh fine enough to express both the training sharding and (replica × tensor) on the same devices.

    Args:
        mesh: the refined mesh; the product of its axes is the training mesh's, in the same device order.
        replica_axes: axes of ``mesh`` that tell replicas apart.
        tensor_axes: axes of ``mesh`` inside a replica.
        training_axes: for each axis of the training mesh, the axes of ``mesh`` that make it up.
    """

    mesh: Mesh
    replica_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    training_axes: dict[str, tuple[str, ...]]

    @property
    def replicas(self) -> int:
        """Groups of devices that decode different sequences."""
        return math.prod(self.mesh.shape[axis] for axis in self.replica_axes)

    @property
    def tensor(self) -> int:
        """Devices that share one replica's weights."""
        return math.prod(self.mesh.shape[axis] for axis in self.tensor_axes)

    def sharding(self, *dims: tuple[str, ...] | None) -> NamedSharding:
        """A sharding on the grid's mesh, one entry per array axis."""
        return NamedSharding(self.mesh, PartitionSpec(*dims))

    def training_spec(self, array: jax.Array | jax.ShapeDtypeStruct, path: str) -> PartitionSpec:
        """The partition spec, on the grid's mesh, of where ``array`` lies now.

        Raises:
            ConfigError: the array lies on other devices, or in an order that the grid cannot express.
        """
        sharding = array.sharding
        if sharding is not None and self.mesh.size == 1 and len(sharding.device_set) == 1:
            return PartitionSpec()
        if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_names) <= set(self.training_axes):
            if sharding.mesh.devices.size == self.mesh.size:
                return PartitionSpec(*(self._refine(entry) for entry in sharding.spec))
        raise ConfigError(
            f"the weight {path} is placed as {sharding}; the decode grid needs every weight on the {self.mesh.size} "
            f"devices of the training mesh (axes {sorted(self.training_axes)}). Shard the model over the mesh before "
            "sampling, or give the engine the mesh that the model lies on."
        )

    def _refine(self, entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = (entry,) if isinstance(entry, str) else (entry or ())
        refined = tuple(axis for name in names for axis in self.training_axes[name])
        return refined or None


def decode_grid(mesh: Mesh, tensor: int) -> DecodeGrid:
    """Sees the devices of ``mesh`` as (replica × tensor): ``tensor`` consecutive devices make a replica.

    Args:
        mesh: the training mesh.
        tensor: devices per replica.

    Raises:
        ConfigError: ``tensor`` does not divide the devices along the mesh's axes.
    """
    shape = list(mesh.shape.items())
    bounds = {1, tensor, mesh.size}
    inner = 1
    for _, size in reversed(shape):
        inner *= size
        bounds.add(inner)
    ladder = sorted(bounds)
    if any(high % low for low, high in zip(ladder, ladder[1:], strict=False)) or tensor > mesh.size:
        works = [t for t in range(1, mesh.size + 1) if _nests(t, ladder, tensor)]
        raise ConfigError(
            f"layout {{tensor: {tensor}}} does not fit the mesh {dict(shape)} of {mesh.size} devices: tensor groups "
            f"must nest with the mesh's axes. Set tensor to one of {works}."
        )
    # Axis i of the refined mesh spans the devices between two rungs; the outermost comes first.
    names = [f"grid{i}" for i in range(len(ladder) - 1)]
    sizes = [high // low for low, high in zip(ladder, ladder[1:], strict=False)]
    devices = np.asarray(mesh.devices).reshape(tuple(reversed(sizes)) or (1,))
    axis_names = tuple(reversed(names)) or ("grid",)
    refined = Mesh(devices, axis_names, axis_types=(AxisType.Auto,) * len(axis_names))

    def between(low: int, high: int) -> tuple[str, ...]:
        inside = [name for name, rung in zip(names, ladder, strict=False) if low <= rung < high]
        return tuple(reversed(inside))

    training_axes, inner = {}, 1
    for name, size in reversed(shape):
        training_axes[name] = between(inner, inner * size)
        inner *= size
    return DecodeGrid(
        mesh=refined,
        replica_axes=between(tensor, mesh.size),
        tensor_axes=between(1, tensor),
        training_axes=training_axes,
    )


def _nests(tensor: int, ladder: list[int], refused: int) -> bool:
    rungs = sorted({tensor, *(rung for rung in ladder if rung != refused)})
    return all(high % low == 0 for low, high in zip(rungs, rungs[1:], strict=False))
