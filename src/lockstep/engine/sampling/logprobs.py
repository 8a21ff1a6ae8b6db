"""The most probable tokens of a step and their log-probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.engine.sampling.sampler import Sampled, first_id
from lockstep.placement import DecodeMesh


def top_logprobs(
    logits: Float[Array, "slot local_vocab"], count: int, sampled: Sampled, decode_mesh: DecodeMesh
) -> tuple[Int[Array, "slot count"], Float[Array, "slot count"]]:
    """Returns the ``count`` most probable tokens under the model, most probable first, equal ones by token id.

    Args:
        logits: The model's own logits, this device's part of the vocabulary.
        count: The number of tokens; at most the size of the vocabulary.
        sampled: The sample drawn from these logits, which has their maximum and logsumexp.
        decode_mesh: The decode mesh.

    Returns:
        Token ids and natural-log probabilities, the same on every device of a replica.
    """
    size = logits.shape[1]
    # lax.top_k takes the first of equal numbers: the lower id, and then the lower part of the vocabulary.
    values, ids = jax.lax.top_k(logits, min(count, size))
    ids = ids + first_id(size, decode_mesh)
    if decode_mesh.tensor > 1:
        values = jax.lax.all_gather(values, decode_mesh.tensor_axes, axis=1, tiled=True)
        ids = jax.lax.all_gather(ids, decode_mesh.tensor_axes, axis=1, tiled=True)
        values, order = jax.lax.top_k(values, count)
        ids = jnp.take_along_axis(ids, order, axis=1)
    return ids, values - sampled.max_logit[:, None] - sampled.logsumexp[:, None]
