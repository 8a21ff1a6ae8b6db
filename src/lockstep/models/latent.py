"""Multi-head latent attention: K and V of all heads are made of one latent of each position, which alone is kept.

DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, section 2.1. Queries and keys have a part without positions and a
rotated one; the rotated key is the same in all heads. Training makes K and V of the latent (`expanded`). Decoding
multiplies queries with the matrix that makes K (`absorbed`) and results with the one that makes V (`values_of`):
attention then reads the latent itself, as the only key/value head that there is.
"""

import dataclasses
from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.models import block

NORM_EPSILON: Final = 1e-6
"""The number that norms of latents add to the mean square, in DeepSeek's code and in transformers, whatever other norms
add."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """The sizes of multi-head latent attention, by their names in Hugging Face.

    Raises:
        ConfigError: A size cannot be.

    Example:
        >>> lockstep.models.Latent().size
        576
    """

    kv_lora_rank: int = 512
    """The width of the latent that keys and values are made of."""
    q_lora_rank: int | None = 1536
    """The width of the latent that queries are made of. Null: they are made of the residual stream (V2-Lite)."""
    qk_nope_head_dim: int = 128
    """The elements of a query or key that have no position."""
    qk_rope_head_dim: int = 64
    """The elements of a query or key that are rotated."""
    v_head_dim: int = 128
    """The elements of a value."""

    def __post_init__(self) -> None:
        check_fields(self, "latent.")
        check_at_least(self, 1, *(field.name for field in dataclasses.fields(self)), block="latent.")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"latent.qk_rope_head_dim is {self.qk_rope_head_dim}; elements are rotated in pairs, so it must be "
                "even. Set it to an even number."
            )

    @property
    def head_size(self) -> int:
        """The elements of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def size(self) -> int:
        """The numbers that a layer keeps of a position: the latent, and the rotated key behind it."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentQueries(NamedTuple):
    """The two parts of queries, and the factor of their scores."""

    plain: Float[Array, "*row head nope"]
    rotated: Float[Array, "*row head rope"]
    scale: float

    def joined(self, plain: Array) -> Float[Array, "*row head query"]:
        """Queries of which ``plain`` is the part without positions, for attention whose own factor is by their size."""
        return block.scale_queries(jnp.concatenate([plain, self.rotated], axis=-1), self.scale)


def expanded(
    q: LatentQueries, latent: Float[Array, "*row size"], kv: Float[Array, "*row head nope_and_v"]
) -> tuple[
    Float[Array, "*row head 1 nope_and_rope"], Float[Array, "*row head nope_and_rope"], Float[Array, "*row head v"]
]:
    """Queries, keys and values of each head.

    Args:
        latent: What is kept of each position.
        kv: The keys' part without positions and the values, made of it.
    """
    nope, rope = q.plain.shape[-1], q.rotated.shape[-1]
    shared = jnp.broadcast_to(latent[..., None, -rope:], (*kv.shape[:-1], rope))
    keys = jnp.concatenate([kv[..., :nope], shared], axis=-1)
    return q.joined(q.plain)[..., None, :], keys, kv[..., nope:]


def absorbed(q: LatentQueries, kv_b: Float[Array, "rank head nope_and_v"]) -> Float[Array, "*row 1 head size"]:
    """Queries of all heads for the latent as their one key.

    Args:
        kv_b: The matrix that makes keys and values of the latent.
    """
    of_latent = jnp.einsum("...hn,rhn->...hr", q.plain, kv_b[..., : q.plain.shape[-1]])
    return q.joined(of_latent)[..., None, :, :]


def values_of(attended: Float[Array, "*row head rank"], value_b: Float[Array, "rank head v"]) -> Array:
    """The values that heads attend to ``[*row, head, v]``, made of the latents that they attend to."""
    return jnp.einsum("...hr,rhv->...hv", attended, value_b)
