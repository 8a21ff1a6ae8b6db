"""K and V as the pool holds them: in the dtype of the queries, or in 8 bits.

Eight bits are E4M3 of Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433, section 3): a sign, 4 bits of
exponent, 3 of mantissa, numbers up to 448, NaN and no infinity. There are no scales: a number between 2^-6 and 448 is
off by at most a sixteenth of itself, whatever its neighbours are, so that nothing has to be calibrated.

Where XLA reads and writes the pool, a pool in 8 bits is an array of bytes: on CPU it converts arrays of an 8-bit
floating type to 16 bits and back, the whole pool at every step. Where kernels do, it is an array of that type, which
they take as it is; making it one of bytes would be a copy of the pool.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

FP8 = jnp.dtype(jnp.float8_e4m3fn)
"""The dtype of K and V in 8 bits."""


BYTE = jnp.dtype(jnp.uint8)
"""The dtype of a pool that has them as bytes."""

_LARGEST = float(jnp.finfo(FP8).max)


def to_pool(kv: Float[Array, "*shape"], dtype: jnp.dtype) -> Num[Array, "*shape"]:
    """Rounds K or V to the numbers of a pool, once, when it is written; every reader sees the same rounded numbers.

    In 8 bits finite numbers beyond the largest become the largest; what is not finite becomes NaN, so that a sequence
    that overflowed is seen to have done so.

    Args:
        kv: K or V.
        dtype: The dtype of the pool.
    """
    if dtype not in (FP8, BYTE):
        return kv.astype(dtype)
    rounded = jnp.where(jnp.isfinite(kv), jnp.clip(kv, -_LARGEST, _LARGEST), jnp.nan).astype(FP8)
    return jax.lax.bitcast_convert_type(rounded, dtype)


def as_numbers(kv: Num[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns what `to_pool` made as numbers, in the dtype in which they are stored: bytes as E4M3."""
    return jax.lax.bitcast_convert_type(kv, FP8) if kv.dtype == BYTE else kv
