"""Free and used memory of the devices of this process. Hosts must agree on the minimum before they rely on it."""

import os
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, Sharding

from lockstep.errors import ConfigError
from lockstep.placement.device.chips import chip_of

UNBOUNDED = 2**62
"""The free bytes of a process that has no device in the mesh."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Placed(Protocol):
    """An array, or the description of one, whose sharding may be known."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""

    @property
    def dtype(self) -> Any:
        """The NumPy dtype."""

    @property
    def sharding(self) -> Sharding | None:
        """The sharding; None for an array that is whole on one device."""


def free_bytes(mesh: Mesh, weights: Any = None) -> int:
    """The free bytes on the device of this process in ``mesh`` that has the least, `UNBOUNDED` where it has none there.

    TPUs and GPUs report it; where they report the largest free block too, it is at most that: the KV cache is one
    block. CPU devices share the free memory of the host with all devices of the job, as if all processes ran on this
    host. For devices that can only be compiled for, it is the published size less the weights.

    Args:
        weights: The weights of the model, a pytree of `Placed` leaves; used for devices that can only be compiled for.

    Raises:
        ConfigError: A TPU or GPU does not report its memory.
    """
    running = _running(mesh.devices.flat[0].platform)
    if not running.issuperset(mesh.devices.flat):
        resident = sum(block_bytes(leaf) for leaf in jax.tree.leaves(weights))
        return min(chip_of(device).memory for device in mesh.devices.flat) - resident
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return min((_free(device) for device in local), default=UNBOUNDED)


def used_bytes() -> int | None:
    """The most bytes in use on a device of this process now; None where the backend does not count them (CPU)."""
    return _largest("bytes_in_use")


def peak_bytes() -> int | None:
    """The most bytes ever in use on a device of this process; None where the backend does not count them (CPU)."""
    return _largest("peak_bytes_in_use")


def program_bytes(analysis: Any, platform: str) -> int:
    """The bytes per device at the worst moment of a compiled program, its arguments and its own code among them.

    Args:
        analysis: The compiler's, see `Program.memory`.
    """
    worst = analysis.peak_memory_in_bytes
    if platform == "cpu":  # its compiler leaves temporaries out
        worst += analysis.temp_size_in_bytes
    return int(worst + analysis.generated_code_size_in_bytes)


def raw_stats() -> list[dict[str, int]]:
    """Memory statistics of each device of this process, with the backend's own names; empty on a CPU."""
    return _stats()


def block_bytes(leaf: Placed) -> int:
    """The bytes of one array on each of its devices."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    size: int = leaf.dtype.itemsize
    for dim in shape:
        size *= dim
    return size


def _largest(statistic: str) -> int | None:
    return max((stats[statistic] for stats in _stats() if statistic in stats), default=None)


def _stats() -> list[dict[str, int]]:
    return [device.memory_stats() or {} for device in jax.local_devices()]


def _running(platform: str) -> set[jax.Device]:
    """The devices of a platform that programs can run on."""
    try:
        return set(jax.devices(platform))
    except RuntimeError:  # this process has no such backend
        return set()


def _free(device: jax.Device) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        limit = int(stats["bytes_limit"])
        # What a TPU keeps for the temporaries of its programs is in no array, and nobody else gets it.
        free = limit - int(stats["bytes_in_use"]) - int(stats.get("bytes_reserved", 0))
        if "largest_free_block_bytes" in stats:
            # An allocator that takes memory from the device as it needs it could still get the rest as one block.
            untouched = limit - int(stats["pool_bytes"]) if "pool_bytes" in stats else 0
            free = min(free, max(int(stats["largest_free_block_bytes"]), untouched))
        return max(0, free)
    if device.platform != "cpu":
        raise ConfigError(
            f"{device} ({device.device_kind}) does not report its memory, so that nobody knows how much is free. Set "
            "memory_bytes_per_device to the bytes of a device that sampling may count on."
        )
    return _host_bytes() // (jax.process_count() * jax.local_device_count())


def _host_bytes() -> int:
    """The free bytes of this host, or of its container where that has less."""
    candidates = []
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines() if ":" in line)
        if "MemAvailable" in lines:
            candidates.append(int(lines["MemAvailable"].split()[0]) * 1024)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            candidates.append(max(0, int(limit) - int(used)))
    except OSError:
        pass  # not in a container, or cgroup v1
    if not candidates:
        candidates.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(candidates)
