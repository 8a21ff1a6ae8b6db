"""Context parallelism: the positions of a row split over devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray, named
from haliax.partitioning import physical_axis_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from lockstep.errors import ConfigError
from lockstep.placement.device import auto_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitPositions:
    """The pieces of a row that each device has: of 2n pieces device i has i and 2n - 1 - i.

    Causal attention is then the same work on every device. Keys and values are gathered before each attention, as in
    section 3.3.2 of Llama 3 (arXiv 2407.21783).

    Args:
        devices: Its size, n.
    """

    axis: str
    devices: int
    length: int

    @classmethod
    def of(cls, Position: Axis) -> "SplitPositions | None":
        """Return the split for the mesh and the axis mapping that are set; None where each device has whole rows.

        Raises:
            ConfigError: The pieces would not be equal.
        """
        mesh, axis = jax.sharding.get_abstract_mesh(), physical_axis_name("position")
        if not isinstance(axis, str) or axis not in mesh.shape or mesh.shape[axis] == 1:
            return None
        devices = mesh.shape[axis]
        if Position.size % (2 * devices):
            raise ConfigError(
                f"rows have {Position.size} positions, and {axis}={devices} in trainer.mesh_shape splits them into "
                f"{2 * devices} equal pieces. Make data.max_seq_len a multiple of {2 * devices}, or {axis} smaller."
            )
        return cls(axis=axis, devices=devices, length=Position.size)

    def refusal(self, subject: str) -> str:
        """The message that ``subject`` cannot be computed with this split."""
        return (
            f"trainer.mesh_shape has {self.axis}={self.devices}, which splits the positions of a row, and {subject} "
            f"needs whole rows on a device. Leave {self.axis} out of trainer.mesh_shape."
        )

    @property
    def order(self) -> Int[np.ndarray, " position"]:
        """The positions in the order of the devices that have them."""
        pieces = np.arange(self.length).reshape(2, self.devices, -1)
        pieces[1] = pieces[1, ::-1]
        return pieces.swapaxes(0, 1).reshape(-1)

    def split(self, x: NamedArray) -> NamedArray:
        """Return an array with its axis ``position`` in `order`."""
        return x["position", named(self.order, "position")]

    def joined(self, x: Array) -> Array:
        """Return an array ``[batch, position, ...]`` in `order`, all of it on each device, by ascending position."""
        pieces = x.reshape(len(x), self.devices, 2, -1, *x.shape[2:])
        return jnp.concatenate([pieces[:, :, 0], pieces[:, ::-1, 1]], axis=1).reshape(x.shape)

    def restore(self, x: Float[Array, "batch position embed"], batch_axes: PartitionSpec) -> Array:
        """Return an array in `order` by ascending position, split evenly over the devices.

        Args:
            batch_axes: The partition of its rows.
        """
        mesh = jax.sharding.get_abstract_mesh()
        # Each device has one piece of an even number and one of an odd number, and so it is when the row is in order.
        home = {piece: min(piece, 2 * self.devices - 1 - piece) for piece in range(2 * self.devices)}
        routes = [[(home[piece], piece // 2) for piece in range(odd, 2 * self.devices, 2)] for odd in (0, 1)]

        def local(x: Array) -> Array:
            first, second = jnp.split(x, 2, axis=1)
            device = jax.lax.axis_index(self.axis)
            even = jnp.where(device % 2 == 0, first, second)
            odd = jnp.where(device % 2 == 0, second, first)
            early = jax.lax.ppermute(even, self.axis, routes[0])
            # One after the other: XLA's runtime for CPUs orders collectives by their beginnings alone.
            early, odd = jax.lax.optimization_barrier((early, odd))
            return jnp.concatenate([early, jax.lax.ppermute(odd, self.axis, routes[1])], axis=1)

        spec = PartitionSpec(*batch_axes, self.axis)
        return jax.shard_map(
            local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=auto_axes(mesh), check_vma=False
        )(x)
