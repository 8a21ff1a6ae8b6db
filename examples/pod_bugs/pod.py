"""What the scripts of this folder have in common: a job, and a mesh of all its devices."""

import functools

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import lockstep


@functools.cache
def start() -> Mesh:
    """Join the job, where there is one, and return a mesh of all devices."""
    lockstep.start()
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding with a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
