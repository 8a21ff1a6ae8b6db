"""The next token of each sequence, drawn alike whatever the batch, the layout or the number of hosts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from lockstep.placement.layout import DecodeGrid


def sample(
    logits: Float[Array, "slot local_vocab"],
    temperature: Float[Array, " slot"],
    draw: UInt[Array, "slot 3"],
    position: Int[Array, " slot"],
    grid: DecodeGrid,
) -> tuple[Int[Array, " slot"], Float[Array, " slot"]]:
    """Samples one token per slot, inside ``shard_map``; greedy where the temperature is 0.

    A draw is the argmax of ``logits / temperature + Gumbel noise`` (Gumbel 1954; the "Gumbel-max trick"), with noise
    that depends on (seed, prompt, generation, position, token) alone. Ties go to the lowest token id.

    Args:
        logits: this device's part of the vocabulary, float32, -inf where a token is not allowed.
        temperature: per slot.
        draw: seed, prompt number, generation number.
        position: position of the token to sample.
        grid: the decode grid; the vocabulary is split over its tensor axes.

    Returns:
        Token ids, and their natural-log probabilities at temperature 1; the same on every device of a replica.
    """
    size = logits.shape[1]
    first = _part(grid) * size
    ids = first + jnp.arange(size)

    def noisy(scores: Array) -> Array:
        noise = jax.vmap(lambda words, at: _gumbel(words, at, ids))(draw, position)
        hot = temperature[:, None] > 0
        return jnp.where(hot, scores / jnp.where(hot, temperature[:, None], 1.0) + noise, scores)

    scores = jax.lax.cond(jnp.any(temperature > 0), noisy, lambda scores: scores, logits)
    best = jnp.argmax(scores, axis=1)
    top = jnp.max(logits, axis=1)
    rows = jnp.arange(len(best))
    mass = jnp.sum(jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0)[:, None]), axis=1)
    candidates = jnp.stack([scores[rows, best], logits[rows, best], top, mass], axis=-1)
    token = first + best
    if grid.tensor == 1:
        return token, candidates[:, 1] - candidates[:, 2] - jnp.log(candidates[:, 3])
    candidates = jax.lax.all_gather(candidates, grid.tensor_axes)  # [part, slot, 4]; parts in order of token id
    token = jax.lax.all_gather(token, grid.tensor_axes)
    winner = jnp.argmax(candidates[..., 0], axis=0)
    tops, masses = candidates[..., 2], candidates[..., 3]
    top = jnp.max(tops, axis=0)
    total = jnp.sum(jnp.where(jnp.isfinite(tops), masses * jnp.exp(tops - top), 0.0), axis=0)
    return token[winner, rows], candidates[winner, rows, 1] - top - jnp.log(total)


def _part(grid: DecodeGrid) -> Array | int:
    return jax.lax.axis_index(grid.tensor_axes) if grid.tensor > 1 else 0


def _gumbel(words: Array, position: Array, ids: Array) -> Array:
    seed, prompt, generation = words
    key = jax.random.key(seed, impl="threefry2x32")
    for part in (prompt, generation, position):
        key = jax.random.fold_in(key, part)
    # One key per token id, not one array of noise: a device draws its own part of the vocabulary and nothing else.
    bits = jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token))[0])(ids)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))
