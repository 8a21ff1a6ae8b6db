"""The slices that the TPU compiler can be asked for, on a machine without a TPU."""

import dataclasses
import functools
import importlib.util
import math
import os
from typing import Any, Final

import jax
from jax.experimental import topologies

from lockstep.errors import ConfigError
from lockstep.launch import Slice, slices, unpublished

NO_COMPILER: Final = (
    "lockstep plan compiles with the TPU compiler, and the package libtpu is not installed here. Install it with "
    "pip install 'jax-lockstep[plan]'; no TPU is needed."
)


COMPILERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    # Both TensorCores of a chip as one device, as JAX sees a v4.
    "v4": ("v4", {"chip_config_name": "megacore"}),
    "v5p": ("v5p", {}),
    "v5litepod": ("v5e", {}),
    "v6e": ("v6e", {}),
    "tpu7x": ("tpu7x", {}),  # each TensorCore is a device
}
"""The TPU compiler's name of each generation that it can be asked for, and options for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """One slice, or several of one kind."""

    name: str  # the name under which it is rented, such as `v5p-64`; of two slices `2xv5p-64`
    grid: tuple[int, ...]  # number of chips of a slice along each axis
    devices: tuple[jax.Device, ...]  # the devices as JAX would see them; they can be compiled for, not run on
    num_slices: int = 1

    @property
    def chips(self) -> int:
        """The number of chips, each of which is one device or several."""
        return math.prod(self.grid) * self.num_slices

    @property
    def slice_name(self) -> str:
        return self.name.partition("x")[2] if self.num_slices > 1 else self.name

    @property
    def hosts(self) -> int:
        """The number of processes of a job on the slice."""
        return len({device.process_index for device in self.devices})

    @property
    def devices_per_host(self) -> int:
        """The number of devices of each process."""
        return len(self.devices) // self.hosts

    @property
    def kind(self) -> str:
        return str(self.devices[0].device_kind)

    def describe(self) -> str:
        """The slice in one line of text."""
        grid, chips = "x".join(map(str, self.grid)), self.chips
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        cores = f" of {len(self.devices) // chips} devices" if len(self.devices) > chips else ""
        grid += "" if self.num_slices == 1 else f" in each of {self.num_slices} slices"
        return f"{self.name}: {chips} chips ({grid}){cores}, {hosts} with {chips // self.hosts} each"

    def on_host(self) -> tuple[jax.Device, ...]:
        """The devices of one process, as a slice of their own: the compiler does not take all parts of a larger one."""
        for name in names_of(self.slice_name.rpartition("-")[0]):
            if known_names()[name].hosts == 1 and len(topology(name).devices) == self.devices_per_host:
                return topology(name).devices
        return tuple(device for device in self.devices if device.process_index == 0)


def known_names() -> dict[str, Slice]:
    """Every slice that can be compiled for, by its name."""
    return {name: slice_ for name, slice_ in slices().items() if slice_.family.prefix in COMPILERS}


def names_of(prefix: str) -> list[str]:
    """The names of the slices of one generation, smallest first."""
    return [name for name in known_names() if name.rpartition("-")[0] == prefix]


@functools.cache
def topology(name: str) -> Topology:
    """The slice of a name, or several, as the TPU compiler describes them.

    Args:
        name: The name, such as ``v5p-64``, ``v5litepod-8``, ``v6e-16``; of two slices ``2xv5p-64``.

    Raises:
        ConfigError: There is no slice of this name, or the TPU compiler is not installed.
    """
    known = known_names()
    count, _, slice_name = name.partition("x") if name[:1].isdecimal() else ("1", "", name)
    if generation := unpublished(slice_name or name):
        raise ConfigError(
            f"topology {name!r} cannot be planned: no TPU compiler (libtpu up to 0.0.52) knows {generation}, and no "
            "slices of it are documented (2026-11-28). Plan for another generation, such as tpu7x-128."
        )
    if slice_name not in known or not count.isdecimal() or int(count) < 1:
        listed = "; ".join(", ".join(names_of(prefix)) for prefix in COMPILERS)
        raise ConfigError(f"topology {name!r} is not known. Known: {listed}; 2x before a name: two of them.")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(NO_COMPILER)
    # The compiler would ask the machine which TPU it has, wait for an answer that never comes, and complain;
    # and it would let one process at a time load it, as if there were a device to share.
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_MIN_LOG_LEVEL", "3"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(variable, value)
    slice_, (compiler_name, options) = known[slice_name], COMPILERS[known[slice_name].family.prefix]
    if int(count) > 1:
        options = {**options, "num_slices": int(count)}
    if slice_.hosts == 1 and len(slice_.grid) == 2:  # the compiler would take it for several machines
        options = {**options, "chips_per_host_bounds": (*slice_.grid, 1)}
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{compiler_name}:{slice_.topology}", **options
        ).devices
    except Exception as error:  # the plugin raises what it likes
        raise ConfigError(
            f"the TPU compiler does not know topology {name} ({compiler_name}:{slice_.topology}): {error}. Install the "
            "version of libtpu that the extra [plan] names."
        ) from error
    return Topology(name=name, grid=slice_.grid, devices=tuple(devices), num_slices=int(count))
