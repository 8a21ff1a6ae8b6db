"""Numbers in 8 bits: E4M3, and the bytes that stand for them where XLA would widen an array of that type.

On CPU XLA keeps no array of an 8-bit floating type in 8 bits: it converts it to 16 bits and back, the whole array each
time. So there such an array is one of bytes, and its numbers are made where they are read.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

FP8: Final = jnp.dtype(jnp.float8_e4m3fn)
"""E4M3 of Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433, section 3)."""
BYTE: Final = jnp.dtype(jnp.uint8)
"""The dtype of an array that has the bits of such numbers."""
LARGEST_FP8: Final = float(jnp.finfo(FP8).max)


def as_numbers(array: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Return an array as numbers: bytes as E4M3, all others as they are."""
    return jax.lax.bitcast_convert_type(array, FP8) if array.dtype == BYTE else array
