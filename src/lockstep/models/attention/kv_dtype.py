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

from lockstep.placement.device import BYTE, FP8, LARGEST_FP8


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
    rounded = jnp.where(jnp.isfinite(kv), jnp.clip(kv, -LARGEST_FP8, LARGEST_FP8), jnp.nan).astype(FP8)
    return jax.lax.bitcast_convert_type(rounded, dtype)
