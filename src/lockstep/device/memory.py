"""How much memory the devices of this process have left. Hosts must agree on the least before anything follows."""

import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from lockstep.device.chips import chip_of

UNBOUNDED = 2**62
"""What a process says that has no device in the mesh."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(mesh: Mesh, weights: PyTree | None = None) -> int:
    """Bytes left on the fullest device of this process in ``mesh``.

    TPUs and GPUs are asked. CPU devices share what the host has left with all devices of the job, as if all processes
    ran on this host. Of devices that can only be compiled for, it is the published size less the weights as they lie.

    Args:
        mesh: of the engine.
        weights: of the model, for devices that can only be compiled for.

    Returns:
        Bytes; `UNBOUNDED` where this process has no device in the mesh.
    """
    running = _running(mesh.devices.flat[0].platform)
    if not running.issuperset(mesh.devices.flat):
        resident = sum(block_bytes(leaf) for leaf in jax.tree.leaves(weights))
        return min(chip_of(device).memory for device in mesh.devices.flat) - resident
    mine = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return min((_free(device) for device in mine), default=UNBOUNDED)


def used_bytes() -> int | None:
    """Bytes that the fullest device of this process holds now; None where the backend does not count (CPU)."""
    return _fullest("bytes_in_use")


def peak_bytes() -> int | None:
    """The most that a device of this process has ever held; None where the backend does not count (CPU)."""
    return _fullest("peak_bytes_in_use")


def block_bytes(leaf: Any) -> int:
    """Bytes of one array on each of its devices."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    size: int = leaf.dtype.itemsize
    for dim in shape:
        size *= dim
    return size


def _fullest(figure: str) -> int | None:
    return max((stats[figure] for stats in _stats() if figure in stats), default=None)


def _stats() -> list[dict[str, int]]:
    return [device.memory_stats() or {} for device in jax.local_devices()]


def _running(platform: str) -> set[jax.Device]:
    try:
        return set(jax.devices(platform))
    except RuntimeError:  # no such backend here
        return set()


def _free(device: jax.Device) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return max(0, int(stats["bytes_limit"]) - int(stats["bytes_in_use"]))
    return _host_bytes() // (jax.process_count() * jax.local_device_count())


def _host_bytes() -> int:
    """Memory of this host, or of its container, that programs could still take."""
    left = []
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            left.append(int(lines["MemAvailable"].split()[0]) * 1024)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            left.append(max(0, int(limit) - int(used)))
    except OSError:
        pass  # not in a container, or an older kind of cgroup
    if not left:
        left.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(left)
