"""The log-probabilities of given tokens, and of the most probable ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.engine.sampling.logits_processors import local_ids
from lockstep.engine.sampling.sampler import Sampled, exact_log, exact_sum_exp, first_id
from lockstep.placement import DecodeMesh


def target_logprobs(
    logits: Float[Array, "slot local_vocab"], target: Int[Array, " slot"], decode_mesh: DecodeMesh, *, exact: bool
) -> Sampled:
    """Return given tokens as if they had been sampled at temperature 1.

    Args:
        logits: The model's own logits, this device's part of the vocabulary.
        exact: Whether sums over the vocabulary are those of ``numerics: exact``.
    """
    max_logit = jnp.max(logits, axis=1)
    if decode_mesh.tensor > 1:
        max_logit = jax.lax.pmax(max_logit, decode_mesh.tensor_axes)
    sum_exp = jnp.sum(jnp.exp(logits - max_logit[:, None]), axis=1)
    size = logits.shape[1]
    index = local_ids(target, first_id(size, decode_mesh), size)
    logit = jnp.take_along_axis(logits, jnp.minimum(index, size - 1)[:, None], axis=1)[:, 0]
    logit = jnp.where(index < size, logit, 0.0)
    if decode_mesh.tensor > 1:
        sum_exp, logit = jax.lax.psum((sum_exp, logit), decode_mesh.tensor_axes)
    logprob = logit - max_logit
    logsumexp = exact_log(exact_sum_exp(logits, max_logit, decode_mesh)) if exact else jnp.log(sum_exp)
    logprob = logprob - logsumexp
    return Sampled(target, logprob, logprob, max_logit, logsumexp)


def top_logprobs(
    logits: Float[Array, "slot local_vocab"], count: int, sampled: Sampled, decode_mesh: DecodeMesh
) -> tuple[Int[Array, "slot count"], Float[Array, "slot count"]]:
    """Return the ``count`` most probable tokens under the model, most probable first, equal ones by token id.

    Args:
        logits: The model's own logits, this device's part of the vocabulary.
        count: The number of tokens; at most the size of the vocabulary.
        sampled: The sample drawn from these logits, which has their maximum and logsumexp.

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
