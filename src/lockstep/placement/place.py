"""Host data onto global devices; each host touches only the parts that its own devices have.

``jax.device_put`` of a host array to a sharding over several hosts first compares the array between all of them: an
all-gather whose memory grows with the number of processes. Nothing here compares or gathers, and nothing here launches
a device program. That every host brings the same data is the caller's promise (`hosts.Hosts.agree` proves it cheaply).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from lockstep.errors import ConfigError

Index = tuple[slice, ...]

CPU_ALIGNMENT: Final = 64
"""The alignment in bytes that XLA's CPU backend asks of a buffer that it uses without a copy."""


def place(host_array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Place an array that every host has, in full, onto a sharding that may span hosts.

    Args:
        host_array: The whole array, any shape; the same on every host. It is not aliased: it may be changed afterwards.

    Returns:
        The global array. No collective, no launch; no host memory but that of local shards on the CPU backend.

    Raises:
        ConfigError: An axis cannot be divided as the sharding asks.
    """
    host_array = np.asarray(host_array)
    return _place_shards(host_array.shape, sharding, lambda index: host_array[index])


def place_argument(host_array: np.ndarray, sharding: Sharding) -> jax.Array:
    """`place` for an argument of a launch: one call for all devices, a fifth of the time, and nothing is waited for.

    Args:
        host_array: The whole array, any shape; the same on every host. The caller never changes it afterwards.

    Returns:
        The global array, which no program may overwrite: devices of this host may share one copy of a part.

    Raises:
        ConfigError: An axis cannot be divided as the sharding asks.
    """
    return _place_at_once(host_array.shape, sharding, lambda index: host_array[index])


def host_rows(sharding: Sharding, n_rows: int) -> slice:
    """The rows of a global batch that are on this host's devices, a contiguous slice with a start and a stop.

    Args:
        sharding: The sharding of an array whose axis 0 is the row.

    Raises:
        ConfigError: The rows cannot be divided as the sharding asks, or this host's rows are not contiguous.
    """
    _check_divisible((n_rows,), sharding)
    indices = sharding.addressable_devices_indices_map((n_rows,)).values()
    rows = sorted({_bounds(index[0] if index else slice(None), n_rows) for index in indices})
    for (_, stop), (start, _) in zip(rows, rows[1:], strict=False):
        if stop != start:
            raise ConfigError(
                f"this host's devices hold rows {rows} of {n_rows}, which are not one range. Build the mesh with "
                "lockstep.placement.make_mesh, which keeps the devices of a host together."
            )
    return slice(rows[0][0], rows[-1][1])


def place_local(local_rows: np.ndarray, sharding: Sharding, n_rows: int) -> jax.Array:
    """Place a global batch of which each host brings only its own rows.

    Args:
        local_rows: ``[rows of this host, ...]``: the rows that `host_rows` names, in order. Not aliased.
        sharding: The sharding of the global array; axis 0 is the row.

    Returns:
        The global array ``[n_rows, ...]``, which no program may overwrite: see `place_argument`. No collective, no
        launch.

    Raises:
        ConfigError: The number of local rows is not that of the rows on this host's devices.
    """
    local_rows = np.asarray(local_rows)
    rows = host_rows(sharding, n_rows)
    if local_rows.shape[0] != rows.stop - rows.start:
        raise ConfigError(
            f"{local_rows.shape[0]} local rows were given, but this host's devices hold rows {rows.start} to "
            f"{rows.stop} of {n_rows}. Pass exactly the rows that host_rows(sharding, {n_rows}) names."
        )

    def read(index: Index) -> np.ndarray:
        start, stop = _bounds(index[0], n_rows)
        return local_rows[(slice(start - rows.start, stop - rows.start), *index[1:])]

    # The transfers read the caller's memory, which is the caller's again when this returns.
    return jax.block_until_ready(_place_at_once((n_rows, *local_rows.shape[1:]), sharding, read))


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """An array that the CPU backend uses without a copy, where ``jax.device_put`` would copy any other."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + CPU_ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % CPU_ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _place_shards(shape: tuple[int, ...], sharding: Sharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    _check_divisible(shape, sharding)
    shards = [
        jax.device_put(_owned(read(index or ()), device), device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    # The transfers read the caller's memory, which is the caller's again when this returns.
    jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _place_at_once(shape: tuple[int, ...], sharding: Sharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    _check_divisible(shape, sharding)
    device = next(iter(sharding.addressable_devices))
    return jax.make_array_from_callback(shape, sharding, lambda index: _owned(read(index or ()), device))


def _owned(values: np.ndarray, device: jax.Device) -> np.ndarray:
    """Values that the device may keep.

    The CPU backend goes on using an aligned buffer that it is given (whatever ``may_alias`` says, jax 0.11) and copies
    any other: an aligned copy is both safe from the caller's changes and the only copy.
    """
    if device.platform != "cpu":
        return values
    copy = aligned_empty(values.shape, values.dtype)
    copy[...] = values
    return copy


def _check_divisible(shape: tuple[int, ...], sharding: Sharding) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        where = f"{sharding.spec} on mesh {dict(sharding.mesh.shape)}" if isinstance(sharding, NamedSharding) else ""
        raise ConfigError(
            f"an array of shape {shape} cannot be placed as {where or sharding}: {error} Choose sizes that the mesh "
            "axes divide, or another mesh_shape."
        ) from error


def _bounds(index: slice, size: int) -> tuple[int, int]:
    start, stop, _ = index.indices(size)
    return start, stop
