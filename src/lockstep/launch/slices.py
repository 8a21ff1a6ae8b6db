"""TPU slices by the names under which they are rented: chips, hosts, and what Google calls their machines.

Standard library only, because `lockstep launch` runs before anything is installed.
"""

import dataclasses
import functools
import math
import re
from typing import Final

from lockstep.errors import ConfigError

CHIPS_PER_HOST: Final = 4  # chips of each machine of a slice that has several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One generation of TPUs."""

    prefix: str
    cores_in_name: int  # number that a name counts per chip: 2 where it counts TensorCores, 1 where it counts chips
    grids: tuple[tuple[int, ...], ...]  # the grids of all documented slices, smallest first
    single_host: frozenset[tuple[int, ...]]  # the grids that are one machine with all chips
    source: str
    devices_per_chip: int = 1
    runtime_version: str = ""  # the image of a Cloud TPU node; empty where its API has none
    machine_types: tuple[tuple[int, str], ...] = ()  # Compute Engine's, by chips per machine
    image_family: str = ""  # of Compute Engine, in `IMAGE_PROJECT`


IMAGE_PROJECT: Final = "ubuntu-os-accelerator-images"  # Google's project with the images of `Family.image_family`

# A cuboid is rented in the shape that is nearest to a cube, with sides that are multiples of 4 from 64 chips on.
_V4 = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 12), (8, 8, 16),
       (8, 16, 16), (12, 16, 16))  # fmt: skip
_V5P = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 4, 12), (4, 8, 8), (4, 8, 12), (8, 8, 8),
        (8, 8, 12), (8, 12, 12), (8, 8, 16), (12, 12, 12), (8, 12, 16), (8, 16, 16), (12, 12, 16), (12, 16, 16),
        (16, 16, 16), (12, 16, 24), (16, 16, 24))  # fmt: skip
_TPU7X = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16),
          (8, 16, 16))  # fmt: skip
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_ONE_BOARD = frozenset({(2, 2, 1)})
_ONE_VM = frozenset({(1, 1), (2, 2), (2, 4)})
_ACCEL_2204 = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"

# Runtime versions: https://cloud.google.com/tpu/docs/runtimes. Machine types and images:
# https://docs.cloud.google.com/compute/docs/tpus/tpu-machines; Compute Engine has no v5e, whatever its lists say.
FAMILIES: Final = (
    Family(
        prefix="v4", cores_in_name=2, grids=_V4, single_host=_ONE_BOARD, source="https://cloud.google.com/tpu/docs/v4",
        runtime_version="tpu-ubuntu2204-base",
    ),
    Family(
        prefix="v5p", cores_in_name=2, grids=_V5P, single_host=_ONE_BOARD,
        source="https://cloud.google.com/tpu/docs/v5p", runtime_version="v2-alpha-tpuv5",
        machine_types=((4, "ct5p-hightpu-4t"),), image_family=_ACCEL_2204,
    ),
    Family(
        prefix="v5litepod", cores_in_name=1, grids=_FLAT, single_host=_ONE_VM,
        source="https://cloud.google.com/tpu/docs/v5e", runtime_version="v2-alpha-tpuv5-lite",
    ),
    Family(
        prefix="v6e", cores_in_name=1, grids=_FLAT, single_host=_ONE_VM, source="https://cloud.google.com/tpu/docs/v6e",
        runtime_version="v2-alpha-tpuv6e",
        machine_types=((1, "ct6e-standard-1t"), (4, "ct6e-standard-4t"), (8, "ct6e-standard-8t")),
        image_family=_ACCEL_2204,
    ),
    Family(
        prefix="tpu7x", cores_in_name=2, devices_per_chip=2, grids=_TPU7X, single_host=_ONE_BOARD,
        source="https://docs.cloud.google.com/tpu/docs/tpu7x",
        machine_types=((4, "tpu7x-standard-4t"),), image_family="ubuntu-accel-2404-amd64-tpu-tpu7x",
    ),
)  # fmt: skip


def unpublished(name: str) -> str | None:
    """Return the generation of a name whose slices and machines are not documented; None for any other name."""
    generation = re.match(r"(?:tpu)?[ _-]?v?8([ti])(?![a-z0-9])", name.lower())
    return f"TPU 8{generation[1]}" if generation else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """One slice, from its name alone."""

    name: str
    family: Family
    grid: tuple[int, ...]  # number of chips along each axis

    @property
    def chips(self) -> int:
        return math.prod(self.grid)

    @property
    def hosts(self) -> int:
        """The number of its machines, each of which runs one process of a job."""
        return 1 if self.grid in self.family.single_host else self.chips // CHIPS_PER_HOST

    @property
    def topology(self) -> str:
        """The grid as Google writes it, such as ``2x4x4``."""
        return "x".join(map(str, self.grid))


@functools.cache
def slices() -> dict[str, Slice]:
    """Every documented slice by its name, smallest first within a generation."""
    by_name = {}
    for family in FAMILIES:
        for grid in family.grids:
            name = f"{family.prefix}-{math.prod(grid) * family.cores_in_name}"
            by_name[name] = Slice(name=name, family=family, grid=grid)
    return by_name


def slice_of(name: str | None) -> Slice | None:
    """Return the slice of a ``--tpu_type``; None where none is given."""
    if not name:
        return None
    if generation := unpublished(name):
        raise ConfigError(
            f"--tpu_type is {name!r}: Google documents no slices and machine types of {generation} (2026-11-28). Make "
            "the machines yourself, and use --backend ssh."
        )
    if name not in slices():
        prefix = name.rpartition("-")[0]
        family = [sibling for sibling in slices() if sibling.rpartition("-")[0] == prefix]
        known = ", ".join(family) or f"names begin with {', '.join(kind.prefix for kind in FAMILIES)}, as in v5p-64"
        raise ConfigError(f"--tpu_type is {name!r}, which is not the name of a slice. Known: {known}.")
    return slices()[name]
