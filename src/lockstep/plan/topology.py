"""TPU slices by the names under which they are rented, as the TPU compiler knows them."""

import dataclasses
import functools
import importlib.util
import math
import os
from typing import Any, Final

import jax
from jax.experimental import topologies

from lockstep.errors import ConfigError

NO_COMPILER: Final = (
    "lockstep plan compiles with the TPU compiler, and the package libtpu is not installed here. Install it with "
    "pip install 'jax-lockstep[plan]'; no TPU is needed."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One generation of TPUs.

    Args:
        prefix: The prefix of the names of its slices.
        compiler_name: The TPU compiler's name for the generation.
        cores_in_name: The number that a name counts per chip: 2 where it counts TensorCores, 1 where it counts chips.
        grids: The grids of all documented slices, smallest first.
        single_host: The grids that are one machine with all chips, where the compiler would take them for several.
        source: The page that lists the grids.
        options: Options for the compiler.
    """

    prefix: str
    compiler_name: str
    cores_in_name: int
    grids: tuple[tuple[int, ...], ...]
    single_host: frozenset[tuple[int, ...]] = frozenset()
    source: str
    options: tuple[tuple[str, Any], ...] = ()


# A cuboid is rented in the shape that is nearest to a cube, with sides that are multiples of 4 from 64 chips on.
_V4 = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 12), (8, 8, 16),
       (8, 16, 16), (12, 16, 16))  # fmt: skip
_V5P = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 4, 12), (4, 8, 8), (4, 8, 12), (8, 8, 8),
        (8, 8, 12), (8, 12, 12), (8, 8, 16), (12, 12, 12), (8, 12, 16), (8, 16, 16), (12, 12, 16), (12, 16, 16),
        (16, 16, 16), (12, 16, 24), (16, 16, 24))  # fmt: skip
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_ONE_VM = frozenset({(1, 1), (2, 2), (2, 4)})

FAMILIES: Final = (
    Family(
        prefix="v4", compiler_name="v4", cores_in_name=2, grids=_V4, source="https://cloud.google.com/tpu/docs/v4",
        # Both TensorCores of a chip as one device, as JAX sees a v4.
        options=(("chip_config_name", "megacore"),),
    ),
    Family(
        prefix="v5p", compiler_name="v5p", cores_in_name=2, grids=_V5P, source="https://cloud.google.com/tpu/docs/v5p"
    ),
    Family(
        prefix="v5litepod", compiler_name="v5e", cores_in_name=1, grids=_FLAT, single_host=_ONE_VM,
        source="https://cloud.google.com/tpu/docs/v5e",
    ),
    Family(
        prefix="v6e", compiler_name="v6e", cores_in_name=1, grids=_FLAT, single_host=_ONE_VM,
        source="https://cloud.google.com/tpu/docs/v6e",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """One slice.

    Args:
        name: The name under which it is rented, such as ``v5p-64``.
        grid: The number of chips along each axis.
        devices: The devices as JAX would see them; they can be compiled for, not run on.
    """

    name: str
    grid: tuple[int, ...]
    devices: tuple[jax.Device, ...]

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
        """The ``device_kind`` of the devices."""
        return str(self.devices[0].device_kind)

    def describe(self) -> str:
        """The slice in one line of text."""
        chips = "x".join(map(str, self.grid))
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        return f"{self.name}: {len(self.devices)} chips ({chips}), {hosts} with {self.devices_per_host} each"

    def on_host(self, process_index: int = 0) -> tuple[jax.Device, ...]:
        """The devices of one process, whose ids need not be consecutive.

        Args:
            process_index: The number of the process.
        """
        return tuple(device for device in self.devices if device.process_index == process_index)


def known_names() -> dict[str, tuple[Family, tuple[int, ...]]]:
    """The generation and the grid of every slice, by the slice's name."""
    return {
        f"{family.prefix}-{math.prod(grid) * family.cores_in_name}": (family, grid)
        for family in FAMILIES
        for grid in family.grids
    }


def names_of(prefix: str) -> list[str]:
    """The names of the slices of one generation, smallest first.

    Args:
        prefix: The prefix of the generation's names.
    """
    return [name for name in known_names() if name.rpartition("-")[0] == prefix]


@functools.cache
def topology(name: str) -> Topology:
    """The slice of a name, as the TPU compiler describes it.

    Args:
        name: The name, such as ``v5p-64``, ``v5litepod-8``, ``v6e-16``.

    Raises:
        ConfigError: There is no slice of this name, or the TPU compiler is not installed.
    """
    known = known_names()
    if name not in known:
        listed = "; ".join(", ".join(names_of(family.prefix)) for family in FAMILIES)
        raise ConfigError(f"topology {name!r} is not known. Known: {listed}.")
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
    family, grid = known[name]
    options = dict(family.options)
    if grid in family.single_host:
        options["chips_per_host_bounds"] = (*grid, 1)
    sizes = "x".join(map(str, grid))
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{family.compiler_name}:{sizes}", **options
        ).devices
    except Exception as error:  # the plugin raises what it likes
        raise ConfigError(
            f"the TPU compiler does not know topology {name} ({family.compiler_name}:{sizes}): {error}. Install the "
            "version of libtpu that the extra [plan] names."
        ) from error
    return Topology(name=name, grid=grid, devices=tuple(found))
