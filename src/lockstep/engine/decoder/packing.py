"""The arrays of a launch and its results inside programs, each as one array: one transfer to it, and one from it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from lockstep.engine.schedule import Batch
from lockstep.placement import DecodeMesh


def unpack(packed: Int32[Array, " word"], example: Batch) -> dict[str, Array]:
    """Return a replica's part of each array of a batch (`Batch.packed`) by name, inside a program.

    Args:
        example: A batch of the same kind and the same shapes.
    """
    arrays = example.arguments()
    sizes = [array[0].size for array in arrays.values()]
    parts = jnp.split(packed, np.cumsum(sizes)[:-1].tolist())
    return {
        name: jax.lax.bitcast_convert_type(part.reshape(array.shape[1:]), array.dtype)
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


def pack_results(results: Sequence[Array], decode_mesh: DecodeMesh) -> Int32[Array, "replica part a b"]:
    """Return results as one array that is replicated on every device, inside ``shard_map``; at most one collective.

    Args:
        results: A replica's arrays ``[a, b]``, which become a part, or ``[a, b, n]``, which become n parts.
    """
    parts = [jnp.moveaxis(array, -1, 0) if array.ndim == 3 else array[None] for array in results]
    packed = jnp.concatenate([jax.lax.bitcast_convert_type(array, jnp.int32) for array in parts])
    return jax.lax.all_gather(packed, decode_mesh.replica_axes) if decode_mesh.replica_axes else packed[None]
