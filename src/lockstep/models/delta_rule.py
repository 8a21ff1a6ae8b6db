"""Linear attention with the gated delta rule: a recurrent layer, whose past is a state of fixed size.

Gated delta networks (Yang et al. 2024, https://arxiv.org/abs/2412.06464), as plain functions. Training, prefill and
decode run these lines: rows of many positions in chunks, and a step of decode as a chunk of one.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least

CHUNK = 64
"""Positions whose writes to the memory are solved for together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """The layers with linear attention: which they are, and their sizes.

    Raises:
        ConfigError: A value cannot work.

    Example:
        >>> lockstep.models.LinearAttention(key_heads=16, value_heads=32).group
        2
    """

    key_heads: int = 16
    """The number of heads of queries and keys."""
    value_heads: int = 32
    """The number of heads of values, a multiple of ``key_heads``: each key head serves as many."""
    key_head_dim: int = 128
    """The size of a query and of a key."""
    value_head_dim: int = 128
    """The size of a value."""
    conv_width: int = 4
    """The number of positions that the convolution of queries, keys and values reads, the token's own included."""

    full_attention_every: int = 4
    """Every how many layers one has attention over all positions instead; ``variant.layer_types`` may say it for each
    layer."""

    def __post_init__(self) -> None:
        check_fields(self, "linear_attention.")
        names = tuple(field.name for field in dataclasses.fields(self))
        check_at_least(self, 1, *names, block="linear_attention.")
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear_attention.key_heads is {self.key_heads} and value_heads is {self.value_heads}; each key head "
                "serves the same number of value heads. Set value_heads to a multiple of key_heads."
            )

    @property
    def group(self) -> int:
        """The number of value heads that a key head serves."""
        return self.value_heads // self.key_heads

    @property
    def qkv(self) -> int:
        """The numbers of a query, a key and the values of one key head, which the convolution reads."""
        return 2 * self.key_head_dim + self.group * self.value_head_dim

    @property
    def qkvz(self) -> int:
        """The same with a gate for each number of the values."""
        return self.qkv + self.group * self.value_head_dim


class DeltaState(NamedTuple):
    """All that a layer keeps of the past of a sequence, whatever its length."""

    inputs: Float[Array, "row past key_head qkv"]
    """The inputs of the convolution at the last ``conv_width - 1`` positions."""
    memory: Float[Array, "row key_head group key value"]
    """The sum of outer products of keys and values, decayed and corrected, in float32."""

    @classmethod
    def zeros(cls, of: LinearAttention, rows: int, key_heads: int, dtype: jnp.dtype) -> "DeltaState":
        """The state of sequences that have no past.

        Args:
            key_heads: The number of key heads on this device.
            dtype: The type of the inputs.
        """
        return cls(
            jnp.zeros((rows, of.conv_width - 1, key_heads, of.qkv), dtype),
            jnp.zeros((rows, key_heads, of.group, of.key_head_dim, of.value_head_dim), jnp.float32),
        )


class DeltaGates(NamedTuple):
    """The changes that a token makes to the memory of each value head, in float32."""

    write: Float[Array, "row position key_head group"]
    """The part of the correction that is written, from 0 to 1 (beta in the paper)."""
    log_decay: Float[Array, "row position key_head group"]
    """The logarithm of the factor of all that was written before, at most 0."""


def gated_delta(
    of: LinearAttention,
    inputs: Float[Array, "row position key_head qkv"],
    taps: Float[Array, "key_head qkv width"],
    gates: DeltaGates,
    state: DeltaState,
    *,
    begins: Int[Array, "row position"] | None = None,
    count: Int[Array, " row"] | None = None,
) -> tuple[Float[Array, "row position key_head group value"], DeltaState]:
    """Convolve queries, keys and values, and read and write the memory, position by position.

    Args:
        inputs: A query, a key and values for each key head, one after the other.
        taps: The weights of the convolution of each number, that of its own position last.
        state: The state after the position before the first.
        begins: The place in the row where the document of each position begins, which knows nothing of what is before;
            below 0 where that is in the state. None: the state is the past of all.
        count: The number of positions of each row that are there; those after them change nothing. None for all.

    Returns:
        What each position reads in float32, and the state after the last position.
    """
    length = inputs.shape[1]
    padded = jnp.concatenate([state.inputs.astype(inputs.dtype), inputs], axis=1)
    if begins is None:
        begins = jnp.full(inputs.shape[:2], -of.conv_width, jnp.int32)
    if count is not None:
        there = (jnp.arange(length) < count[:, None])[..., None, None]
        gates = DeltaGates(*(jnp.where(there, gate, 0.0) for gate in gates))
    x = jax.nn.silu(_convolved(padded, taps, begins))
    q, k, v = jnp.split(x, [of.key_head_dim, 2 * of.key_head_dim], axis=-1)
    q, k = _unit(q) * of.key_head_dim**-0.5, _unit(k)
    v = v.reshape(*v.shape[:-1], of.group, of.value_head_dim)
    out, memory = _read_and_write(q, k, v, gates, state.memory, begins)
    last = jnp.full(len(inputs), length) if count is None else count
    place = last[:, None] + jnp.arange(of.conv_width - 1)
    kept = jnp.take_along_axis(padded, place[..., None, None], axis=1)
    return out, DeltaState(kept.astype(state.inputs.dtype), memory)


def _convolved(padded: Array, taps: Array, begins: Array) -> Array:
    """The causal convolution of each number over positions, within documents, in float32."""
    width, length = taps.shape[-1], begins.shape[1]
    total = jnp.zeros((), jnp.float32)
    for tap in range(width):
        known = jnp.arange(length) + tap - (width - 1) >= begins
        past = jnp.where(known[..., None, None], padded[:, tap : tap + length], 0)
        total = total + past.astype(jnp.float32) * taps[..., tap].astype(jnp.float32)
    return total


def _unit(x: Array) -> Array:
    """Vectors of length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _read_and_write(
    q: Array, k: Array, v: Array, gates: DeltaGates, memory: Array, begins: Array
) -> tuple[Float[Array, "row position key_head group value"], Array]:
    """Return what positions read of the memory, and the memory after the last, one chunk after the other."""
    length = q.shape[1]
    size = min(CHUNK, length)
    chunks = -(-length // size)

    def split(x: Array, mode: str = "constant") -> Array:
        padded = jnp.pad(x, [(0, 0), (0, chunks * size - length), *[(0, 0)] * (x.ndim - 2)], mode=mode)
        return padded.reshape(len(x), chunks, size, *x.shape[2:]).swapaxes(0, 1)

    begins = split(begins, "edge") - size * jnp.arange(chunks)[:, None, None]
    memory, out = jax.lax.scan(jax.checkpoint(_chunk), memory, (*map(split, (q, k, v, *gates)), begins))
    return out.swapaxes(0, 1).reshape(len(q), chunks * size, *out.shape[3:])[:, :length], memory


def _chunk(memory: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
    """The positions of a chunk: section 3.3 of the paper, with a matrix of decays between them.

    A token writes ``k u^T`` with ``u = beta (v - M^T k)``, of the memory M that has decayed up to it. M is that before
    the chunk and what the tokens before wrote, so the ``u`` of all tokens solve a triangular system.

    Args:
        parts: Queries, keys, values, both gates, and the place in the chunk where each token's document begins.
    """
    q, k, v, write, log_decay, begins = parts
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    index = jnp.arange(q.shape[1])
    elapsed = jnp.cumsum(log_decay, axis=1).transpose(0, 2, 3, 1)  # [row, key_head, group, position]
    write = write.transpose(0, 2, 3, 1)
    known = (index[:, None] >= index) & (index >= begins[:, :, None])  # [row, reader, writer]
    between = elapsed[..., :, None] - elapsed[..., None, :]
    decay = jnp.exp(jnp.where(known[:, None, None], between, -jnp.inf))
    since = jnp.exp(jnp.where((begins < 0)[:, None, None], elapsed, -jnp.inf))[..., None]  # of the memory
    correction = v.transpose(0, 2, 3, 1, 4) - since * product("rihk,rhgkv->rhgiv", k, memory)
    written = write[..., None] * correction
    if len(index) > 1:
        overlaps = product("rihk,rjhk->rhij", k, k)[:, :, None]
        written = jax.scipy.linalg.solve_triangular(
            write[..., None] * decay * overlaps, written, lower=True, unit_diagonal=True
        )
    seen = decay * product("rihk,rjhk->rhij", q, k)[:, :, None]
    out = since * product("rihk,rhgkv->rhgiv", q, memory) + product("rhgij,rhgjv->rhgiv", seen, written)
    added = product("rjhk,rhgjv->rhgkv", k, decay[..., -1, :, None] * written)
    return since[..., -1:, :] * memory + added, out.transpose(0, 3, 1, 2, 4)
