"""The decode mesh: the trainer's devices, in the trainer's order, seen as (replica × tensor)."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Set

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement.device import slice_index
from lockstep.placement.mesh import axes_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeMesh:
    """A mesh fine enough to express both the training sharding and (replica × tensor) on the same devices."""

    mesh: Mesh  # the refined mesh; the product of its axes is the training mesh's, in the same device order
    training_shape: dict[str, int]  # the axes of the training mesh and their sizes, in order
    replica_axes: tuple[str, ...]  # the axes of `mesh` between replicas
    tensor_axes: tuple[str, ...]  # the axes of `mesh` inside a replica
    context_axes: tuple[str, ...]  # those of `tensor_axes`, the last ones, that split the positions of a sequence
    training_axes: dict[str, tuple[str, ...]]  # for each axis of the training mesh, the axes of `mesh` that make it up

    @property
    def replicas(self) -> int:
        """Groups of devices that decode different sequences."""
        return math.prod(self.mesh.shape[axis] for axis in self.replica_axes)

    @property
    def tensor(self) -> int:
        """Devices that share one replica's weights."""
        return math.prod(self.mesh.shape[axis] for axis in self.tensor_axes)

    @property
    def context(self) -> int:
        """Devices that split the positions of a sequence."""
        return math.prod(self.mesh.shape[axis] for axis in self.context_axes)

    @property
    def tensor_sizes(self) -> list[int]:
        """Every number of devices per replica that the training mesh allows."""
        return _sizes(self.training_shape, self.mesh.devices)

    def sharding(self, *dims: tuple[str, ...] | None) -> NamedSharding:
        """A sharding on the refined mesh, one entry per array axis."""
        return NamedSharding(self.mesh, PartitionSpec(*dims))

    def training_spec(self, array: jax.Array | jax.ShapeDtypeStruct, path: str) -> PartitionSpec:
        """The partition spec, on the refined mesh, of the placement that ``array`` has now.

        Raises:
            ConfigError: The array is on other devices, or in an order that the decode mesh cannot express.
        """
        expressed = self.expressed(array)
        if expressed is None:
            raise self._misplaced(array, path)
        return expressed

    def check_devices(self, array: jax.Array | jax.ShapeDtypeStruct, path: str) -> None:
        """Refuse an array that is not on the devices of the mesh, in its order: no program takes both.

        Raises:
            ConfigError: It is on others, or in another order.
        """
        sharding, devices = getattr(array, "sharding", None), list(self.mesh.devices.flat)
        if isinstance(sharding, NamedSharding) and list(sharding.mesh.devices.flat) != devices:
            raise self._misplaced(array, path)

    def _misplaced(self, array: jax.Array | jax.ShapeDtypeStruct, path: str) -> ConfigError:
        sharding, devices = getattr(array, "sharding", None), list(self.mesh.devices.flat)
        place, move = "in host memory", "Place it there: jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))."
        if sharding is not None:
            named = isinstance(sharding, NamedSharding)
            order = list(sharding.mesh.devices.flat) if named else sharding.device_set
            place = f"on {_names(order)} as {f'{sharding.spec} on {dict(sharding.mesh.shape)}' if named else sharding}"
            if sharding.device_set != set(devices):
                move = (
                    "Make the whole model there: jax.jit(init, out_shardings=jax.sharding.NamedSharding(mesh, spec))."
                )
        return ConfigError(
            f"the weight {path} is placed {place}; programs take all weights on one mesh, whose devices have one "
            f"order: the training mesh {self.training_shape}, which is {_names(devices)}. {move}"
        )

    def expressed(self, array: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec | None:
        """`training_spec`; None where the decode mesh cannot express it."""
        sharding = getattr(array, "sharding", None)
        devices = list(self.mesh.devices.flat)
        if sharding is None or sharding.device_set != set(devices):
            return None
        if self.mesh.size == 1:
            return PartitionSpec()
        if isinstance(sharding, NamedSharding) and list(sharding.mesh.devices.flat) == devices:
            if _long_axes(sharding.mesh.shape) == _long_axes(self.training_shape):
                return PartitionSpec(*(self._refine(entry) for entry in sharding.spec))
        return None

    def _refine(self, entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        return tuple(axis for name in axes_of(entry) for axis in self.training_axes.get(name, ())) or None


def make_decode_mesh(mesh: Mesh, tensor: int, context: int = 1) -> DecodeMesh:
    """See the devices of ``mesh`` as (replica × tensor): ``tensor`` consecutive devices of a slice make a replica.

    Args:
        context: The number of consecutive ones among them that split the positions of a sequence.

    Raises:
        ConfigError: ``tensor`` does not divide the devices along the mesh's axes, or a replica would cross slices; or
            ``context`` does not divide ``tensor``.
    """
    shape = dict(mesh.shape)
    works = tensor_sizes(mesh)
    if tensor not in works:
        inside = " and stay inside a slice" if len(set(map(slice_index, mesh.devices.flat))) > 1 else ""
        raise ConfigError(
            f"layout {{tensor: {tensor}}} does not fit the mesh {shape} of {mesh.size} devices: tensor groups must "
            f"nest with the mesh's axes{inside}. Set tensor to one of {works}."
        )
    if tensor % context or context not in works:
        works = [size for size in works if tensor % size == 0]
        raise ConfigError(
            f"layout {{tensor: {tensor}, context: {context}}} does not fit the mesh {shape}: those that split "
            f"positions are a part of the tensor group and nest with the mesh's axes. Set context to one of {works}."
        )
    ladder = sorted({tensor, context, *_rungs(shape)})
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
    for name, size in reversed(shape.items()):
        training_axes[name] = between(inner, inner * size)
        inner *= size
    return DecodeMesh(
        mesh=refined,
        training_shape=shape,
        replica_axes=between(tensor, mesh.size),
        tensor_axes=between(1, tensor),
        context_axes=between(1, context),
        training_axes=training_axes,
    )


def tensor_sizes(mesh: Mesh) -> list[int]:
    """Every number of devices per replica that `make_decode_mesh` accepts on a mesh."""
    return _sizes(mesh.shape, mesh.devices)


def _sizes(shape: Mapping[str, int], devices: np.ndarray) -> list[int]:
    rungs, slices = _rungs(shape), np.array([slice_index(device) for device in devices.flat])
    nested = (t for t in range(1, rungs[-1] + 1) if all(t % rung == 0 or rung % t == 0 for rung in rungs))
    return [t for t in nested if (np.ptp(slices.reshape(-1, t), axis=1) == 0).all()]


def _rungs(shape: Mapping[str, int]) -> list[int]:
    """Devices inside one step along each axis, and all of them: each divides the next."""
    rungs = {1, *itertools.accumulate(reversed(list(shape.values())), operator.mul)}
    return sorted(rungs)


def _long_axes(shape: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(name, size) for name, size in shape.items() if size > 1]


def _names(devices: Iterable[jax.Device]) -> str:
    """Devices by name and process; a set has no order, so that they come by number."""
    listed = sorted(devices, key=lambda device: device.id) if isinstance(devices, Set) else list(devices)
    shown = [
        f"{', '.join(map(str, group))} of process {process}"
        for process, group in itertools.groupby(listed[:8], key=lambda device: device.process_index)
    ]
    return f"{len(listed)} devices ({', '.join(shown)}{', …' * (len(listed) > 8)})"
