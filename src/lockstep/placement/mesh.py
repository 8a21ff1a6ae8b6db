"""The device mesh a model trains on, and which mesh axis splits which logical axis."""

from collections.abc import Iterable, Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from lockstep.errors import ConfigError

MESH_AXES: Final = ("dp", "fsdp", "tp")
"""Data parallel (parameters repeated), fully sharded data parallel, tensor parallel."""

PARAMETER_AXES: Final[dict[str, str]] = {
    "embed": "fsdp",
    "mlp": "tp",
    "expert_mlp": "tp",
    "gate_up": "tp",
    "kv_head": "tp",
    "vocab": "tp",
}
"""The mesh axes that split a parameter between steps, by the name of its logical axis."""

COMPUTE_AXES: Final[dict[str, str | tuple[str, ...]]] = {
    "batch": ("dp", "fsdp"),
    "mlp": "tp",
    "expert_mlp": "tp",
    "gate_up": "tp",
    "kv_head": "tp",
    "vocab": "tp",
}
"""The mesh axes that split activations, and parameters in use, inside a step."""

_USAGE: Final = "Use 'auto' (FSDP over all devices), 'host_local', or three sizes 'dp,fsdp,tp' such as '1,-1,1'."


def make_mesh(mesh_shape: str = "auto", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the training mesh with axes ``("dp", "fsdp", "tp")``, devices of one host next to each other.

    Args:
        mesh_shape: ``auto`` = ``1,-1,1``; ``host_local`` = ``dp`` over processes and ``fsdp`` over a process's devices;
            or the three sizes ``dp,fsdp,tp``, one of which may be -1 (whatever is left).
        devices: The devices to use; None means all devices of the job.

    Returns:
        A mesh with `AxisType.Auto` axes. Devices are ordered by (process, id), never by id alone: on large slices the
        ids of one host are not consecutive.

    Raises:
        ConfigError: the shape cannot be read, or does not fit the number of devices.
    """
    ordered = sorted(jax.devices() if devices is None else devices, key=lambda d: (d.process_index, d.id))
    if not ordered:
        raise ConfigError("make_mesh was given an empty list of devices; a mesh needs at least 1. Pass devices=None.")
    if mesh_shape == "auto":
        sizes = (1, len(ordered), 1)
    elif mesh_shape == "host_local":
        sizes = _host_local_sizes(ordered)
    else:
        sizes = _read_sizes(mesh_shape, len(ordered))
    grid = np.empty(len(ordered), dtype=object)
    grid[:] = ordered
    return Mesh(grid.reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def _host_local_sizes(ordered: Sequence[jax.Device]) -> tuple[int, int, int]:
    counts: dict[int, int] = {}
    for device in ordered:
        counts[device.process_index] = counts.get(device.process_index, 0) + 1
    if len(set(counts.values())) != 1:
        raise ConfigError(
            f"mesh_shape is 'host_local', but the processes hold different numbers of devices: {counts} (process: "
            "devices). Start the job with the same number of devices on every process, or use mesh_shape 'auto'."
        )
    return (len(counts), len(ordered) // len(counts), 1)


def _read_sizes(mesh_shape: str, n_devices: int) -> tuple[int, int, int]:
    try:
        sizes = [int(part) for part in mesh_shape.split(",")]
    except ValueError:
        raise ConfigError(f"mesh_shape is {mesh_shape!r}, which is not a mesh shape. {_USAGE}") from None
    if len(sizes) != 3:
        raise ConfigError(f"mesh_shape is {mesh_shape!r}: {len(sizes)} sizes where 3 are needed. {_USAGE}")
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ConfigError(
            f"mesh_shape is {mesh_shape!r}: sizes must be at least 1, and at most one may be -1. {_USAGE}"
        )
    known = int(np.prod([size for size in sizes if size != -1]))
    if -1 in sizes and n_devices % known == 0:
        sizes[sizes.index(-1)] = n_devices // known
    if int(np.prod(sizes)) != n_devices:
        raise ConfigError(
            f"mesh_shape is {mesh_shape!r}, whose given sizes multiply to {known}, but there are {n_devices} devices. "
            f"Choose sizes whose product is {n_devices}, or put -1 in one place and a divisor of {n_devices} in the "
            "others."
        )
    return (sizes[0], sizes[1], sizes[2])


def fsdp_spans_hosts(mesh: Mesh) -> bool:
    """Whether a parameter is sharded over devices of more than one host.

    Args:
        mesh: A mesh from `make_mesh`.

    Returns:
        True when some row of the ``fsdp`` axis has devices of different processes.
    """
    return any(len({device.process_index for device in row}) > 1 for row in _fsdp_rows(mesh))


def fsdp_warning(mesh: Mesh) -> str | None:
    """The text of the warning about FSDP over a network; None where chip links join all devices of each FSDP row.

    Inside a TPU slice hosts are joined by the chips' own links, where FSDP over all devices is right. Slices of TPUs
    are joined by a network, and so are hosts with GPUs or CPUs.

    Args:
        mesh: A mesh from `make_mesh`.
    """
    if mesh.devices.flat[0].platform == "tpu":
        joined, fix = "slices", "mesh_shape: {count},-1,1 (data parallel over slices, FSDP inside) is faster"
    else:
        joined, fix = "hosts", "mesh_shape: host_local (data parallel over hosts, FSDP inside) may be faster"
    if not any(len(_joined(row)) > 1 for row in _fsdp_rows(mesh)):
        return None
    count = len(_joined(mesh.devices.flat))
    return (
        f"FSDP shards parameters over {count} {joined} (mesh {dict(mesh.shape)}): every layer is gathered over the "
        f"network between {joined} at every step. If the model fits one of them, {fix.format(count=count)}; "
        "lockstep plan --meshes all compares meshes."
    )


def _fsdp_rows(mesh: Mesh) -> Iterable[Iterable[jax.Device]]:
    """The devices of each row of the ``fsdp`` axis."""
    rows: Iterable[Iterable[jax.Device]] = np.moveaxis(mesh.devices, MESH_AXES.index("fsdp"), -1).reshape(
        -1, mesh.shape["fsdp"]
    )
    return rows


def _joined(devices: Iterable[jax.Device]) -> set[int]:
    """The groups of devices that no network separates: slices of TPUs, else processes."""
    return {
        getattr(device, "slice_index", 0) if device.platform == "tpu" else device.process_index for device in devices
    }


def data_shards(mesh: Mesh) -> int:
    """The number of parts that a batch is split into on the mesh (``dp`` times ``fsdp``)."""
    return mesh.shape["dp"] * mesh.shape["fsdp"]


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
