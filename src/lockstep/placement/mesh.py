"""The device mesh a model trains on, and which mesh axis splits which logical axis."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement.device import platform_of, slice_index

MESH_AXES: Final = ("dp", "fsdp", "tp")
"""Data parallel (parameters repeated), fully sharded data parallel, tensor parallel: the axes inside a slice."""

PP: Final = "pp"
"""Pipeline parallel: the axis before ``dp``, where there is one, whose parts (stages) have some of the layers each."""

CP: Final = "cp"
"""Context parallel: the axis between ``fsdp`` and ``tp``, where there is one, that splits the positions of a row.
Parameters are repeated over it."""

DCN: Final = "dcn"
"""The outermost axis where there are several slices: data parallel over the data-centre network that joins them."""

PARAMETER_AXES: Final[dict[str, str]] = {
    "embed": "fsdp",
    "q_latent": "fsdp",
    "kv_latent": "fsdp",
    "mlp": "tp",
    "expert_mlp": "tp",
    "gate_up": "tp",
    "shared_mlp": "tp",
    "kv_head": "tp",
    "key_head": "tp",
    "vocab": "tp",
}
"""The mesh axes that split a parameter between steps, by the name of its logical axis."""

COMPUTE_AXES: Final[dict[str, str | tuple[str, ...]]] = {
    "batch": ("dp", "fsdp"),
    **{name: axis for name, axis in PARAMETER_AXES.items() if axis == "tp"},
}
"""The mesh axes that split activations, and parameters in use, inside a step and a slice."""

_USAGE: Final = (
    "Use 'auto' (FSDP over a slice), 'host_local', three sizes 'dp,fsdp,tp' such as '1,-1,1', or sizes by name such as "
    "'fsdp=-1,cp=4', of pp, dp, fsdp, cp and tp."
)


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a partition spec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def make_mesh(mesh_shape: str = "auto", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the training mesh with axes ``("dp", "fsdp", "tp")``, devices of one host next to each other.

    On several slices ``"dcn"`` comes first, of one slice each: every slice has all parameters and a part of the batch.

    Args:
        mesh_shape: The shape of one slice: ``auto`` = ``1,-1,1``; ``host_local`` = ``dp`` over processes and ``fsdp``
            over a process's devices; the three sizes ``dp,fsdp,tp``; or sizes by name, such as ``fsdp=-1,cp=4``, where
            ``pp`` splits the layers into stages, slices among them, ``cp`` the positions of a row, and what is not
            named is 1. One size may be -1 (whatever is left).
        devices: The devices to use; None means all devices of the job.

    Returns:
        A mesh with `AxisType.Auto` axes. Devices are ordered by (slice, process, id), never by id alone: on large
        slices the ids of one host are not consecutive.

    Raises:
        ConfigError: the shape cannot be read, or does not fit the number of devices; slices differ in size.
    """
    unordered = jax.devices() if devices is None else devices
    ordered = sorted(unordered, key=lambda d: (slice_index(d), d.process_index, d.id))
    if not ordered:
        raise ConfigError("make_mesh was given an empty list of devices; a mesh needs at least 1. Pass devices=None.")
    slices = Counter(map(slice_index, ordered))
    if len(set(slices.values())) != 1:
        raise ConfigError(
            f"the slices have different numbers of devices: {dict(slices)} (slice: devices). Use slices of one type."
        )
    replicas, named = len(slices), dict(part.strip().partition("=")[::2] for part in mesh_shape.split(","))
    if (stages := named.get(PP, "1")).isdecimal() and int(stages) > 1 and replicas > 1:
        if int(stages) % replicas and replicas % int(stages):
            raise ConfigError(
                f"mesh_shape is {mesh_shape!r} on {replicas} slices; a slice has one stage, several, or a part of one "
                f"copy. Use a pp that divides {replicas}, or a multiple of it."
            )
        replicas = max(1, replicas // int(stages))
    if mesh_shape == "host_local":
        sizes = dict(zip(MESH_AXES, _host_local_sizes(ordered, replicas), strict=True))
    else:
        sizes = _read_sizes("1,-1,1" if mesh_shape == "auto" else mesh_shape, len(ordered) // replicas, replicas)
    if CP in sizes and (len(slices) > 1 or PP in sizes):
        beside = f"{len(slices)} slices" if len(slices) > 1 else "pp"
        raise ConfigError(
            f"mesh_shape is {mesh_shape!r}, with {beside}; cp splits rows inside one slice, without stages. Use one "
            "slice without pp, or leave cp out."
        )
    if replicas > 1:
        sizes = {DCN: replicas, **sizes}
    grid = np.empty(len(ordered), dtype=object)
    grid[:] = ordered
    return Mesh(grid.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _host_local_sizes(ordered: Sequence[jax.Device], slices: int) -> tuple[int, int, int]:
    counts = Counter(device.process_index for device in ordered)
    if len(set(counts.values())) != 1 or len(counts) % slices:
        raise ConfigError(
            f"mesh_shape is 'host_local', but the processes hold different numbers of devices: {dict(counts)} "
            "(process: devices). Start the job with the same number of devices on each, or use mesh_shape 'auto'."
        )
    return (len(counts) // slices, len(ordered) // len(counts), 1)


def _read_sizes(mesh_shape: str, n_devices: int, slices: int) -> dict[str, int]:
    """The size of each axis of a copy of the model, ``pp`` and ``cp`` only where they are named and more than 1."""
    parts = [part.strip().partition("=") for part in mesh_shape.split(",")]
    names = [name for name, equals, _ in parts if equals]
    try:
        numbers = [int(size if equals else name) for name, equals, size in parts]
    except ValueError:
        raise ConfigError(f"mesh_shape is {mesh_shape!r}, which is not a mesh shape. {_USAGE}") from None
    if names and (len(names) < len(parts) or len({*names}) < len(names) or not {*names} <= {*MESH_AXES, PP, CP}):
        raise ConfigError(f"mesh_shape is {mesh_shape!r}, which does not name each size once. {_USAGE}")
    if not names and len(numbers) != 3:
        raise ConfigError(f"mesh_shape is {mesh_shape!r}: {len(numbers)} sizes where 3 are needed. {_USAGE}")
    if any(size < 1 and size != -1 for size in numbers) or numbers.count(-1) > 1:
        raise ConfigError(
            f"mesh_shape is {mesh_shape!r}: sizes must be at least 1, and at most one may be -1. {_USAGE}"
        )
    sizes = {PP: 1, "dp": 1, "fsdp": 1, CP: 1, "tp": 1, **dict(zip(names or MESH_AXES, numbers, strict=True))}
    known = math.prod(size for size in numbers if size != -1)
    sizes = {name: n_devices // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != n_devices:
        place = "" if slices == 1 else f" in each of the {slices} slices, over which parameters are not split"
        raise ConfigError(
            f"mesh_shape is {mesh_shape!r}, whose given sizes multiply to {known}, but there are {n_devices} devices"
            f"{place}. Choose sizes whose product is {n_devices}, or put -1 in one place and a divisor of it in the "
            "others."
        )
    return {name: size for name, size in sizes.items() if name not in (PP, CP) or size > 1}


def fsdp_spans_hosts(mesh: Mesh) -> bool:
    """Whether a parameter is sharded over devices of more than one host."""
    return any(len({device.process_index for device in row}) > 1 for row in _fsdp_rows(mesh))


def fsdp_warning(mesh: Mesh) -> str | None:
    """The text of the warning about FSDP over a network; None where chip links join all devices of each FSDP row.

    Inside a TPU slice hosts are joined by the chips' own links, where FSDP over all devices is right. Slices of TPUs
    are joined by a network, and so are hosts with GPUs. Processes with CPUs stand for a slice, as those of the demo do.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return None
    if platform_of(platform).slices:
        joined, fix = "slices", "lockstep.placement.make_mesh (data parallel over slices, FSDP inside) is faster"
    else:
        joined, fix = "hosts", "mesh_shape: host_local (data parallel over hosts, FSDP inside) may be faster"
    count = max(len(_joined(row)) for row in _fsdp_rows(mesh))
    if count == 1:
        return None
    return (
        f"FSDP shards parameters over {count} {joined} (mesh {dict(mesh.shape)}): every layer is gathered over the "
        f"network between {joined} at every step. If the model fits one of them, {fix}; "
        "lockstep plan --meshes all compares meshes."
    )


def _fsdp_rows(mesh: Mesh) -> Iterable[Iterable[jax.Device]]:
    """The devices of each row of the ``fsdp`` axis."""
    rows: Iterable[Iterable[jax.Device]] = np.moveaxis(mesh.devices, mesh.axis_names.index("fsdp"), -1).reshape(
        -1, mesh.shape["fsdp"]
    )
    return rows


def _joined(devices: Iterable[jax.Device]) -> set[int]:
    """The groups of devices that no network separates: slices of TPUs, else processes."""
    return {slice_index(device) if platform_of(device.platform).slices else device.process_index for device in devices}


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that split the rows of a batch, outermost first."""
    return tuple(axis for axis in (DCN, PP, "dp", "fsdp") if axis in mesh.shape)


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """The partition of a batch's rows over the mesh."""
    return PartitionSpec(batch_axes(mesh))


def compute_axes(mesh: Any, *, of_slice: bool = False) -> dict[str, str | tuple[str, ...]]:
    """`COMPUTE_AXES` of a program over a mesh, and ``cp`` for positions where the mesh has it.

    Args:
        of_slice: Whether the program is inside a ``shard_map`` over slices.
    """
    rows = tuple(axis for axis in batch_axes(mesh) if axis != DCN or not of_slice)
    return {**COMPUTE_AXES, "batch": rows, **({"position": CP} if CP in mesh.shape else {})}


def parameter_axes(mesh: Any) -> dict[str, str]:
    """`PARAMETER_AXES` on a mesh, and ``pp`` for layers where the mesh has it."""
    return {**PARAMETER_AXES, "layer": PP} if PP in mesh.shape else PARAMETER_AXES


def data_shards(mesh: Mesh) -> int:
    """The number of parts that a batch is split into on the mesh."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def mesh_of(array: jax.Array) -> Mesh:
    """The mesh that a weight is sharded over; a mesh of one device for an array that was never sharded.

    Raises:
        ConfigError: The array is on several devices without a mesh.

    Example:
        >>> lockstep.placement.mesh_of(model.embed.array) == mesh
        True
    """
    if isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh):
        return array.sharding.mesh
    if len(array.sharding.device_set) == 1:
        (device,) = array.sharding.device_set
        return Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))
    raise ConfigError(
        f"the model is on {len(array.sharding.device_set)} devices as {array.sharding}; sampling needs to know their "
        "mesh. Shard the model with a jax.sharding.NamedSharding."
    )
