"""The most probable tokens at each step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.engine.sampling.sampler import Sampled, first_id
from lockstep.placement import DecodeMesh


def top_logprobs(
    logits: Float[Array, "slot local_vocab"], count: int, sampled: Sampled, decode_mesh: DecodeMesh
) -> tuple[Int[Array, "slot count"], Float[Array, "slot count"]]:
    """The ``count`` most probable tokens under the model, most probable first, equal ones by token id.

    Args:
        logits: this device's part of the vocabulary, the model's own.
        count: at most the size of the vocabulary.
        sampled: of these logits.
        decode_mesh: the decode mesh.

    Returns:
        Token ids and natural-log probabilities, the same on every device of a replica.
    """
    size = logits.shape[1]
    # Among equal numbers lax.top_k takes the one that comes first: the lower id, and then the lower part.
    values, ids = jax.lax.top_k(logits, min(count, size))
    ids = ids + first_id(size, decode_mesh)
    if decode_mesh.tensor > 1:
        values = jax.lax.all_gather(values, decode_mesh.tensor_axes, axis=1, tiled=True)
        ids = jax.lax.all_gather(ids, decode_mesh.tensor_axes, axis=1, tiled=True)
        values, order = jax.lax.top_k(values, count)
        ids = jnp.take_along_axis(ids, order, axis=1)
    return ids, values - sampled.top[:, None] - sampled.logsumexp[:, None]
