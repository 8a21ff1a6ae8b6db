"""K and V in 8 bits: whole numbers from -127 to 127 and a float32 scale for each position and head, side by side.

A head of ``n`` numbers is ``n + 4`` bytes, the scale's own four at the end. So the pool stays one array, and whoever
copies, splits or blanks a part of it takes the scales along: four zero bytes are the scale 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

SCALE_BYTES = 4
_LARGEST = 127


def quantise(kv: Float[Array, "*batch head"]) -> Int8[Array, "*batch head_and_scale"]:
    """Rounds a head to multiples of its scale, a 127th of its largest number: half a scale is the largest error.

    A head of zeros has the scale 0. One with a number that is not finite has a scale that is not finite either, so
    that whoever reads it gets NaN.
    """
    wide = kv.astype(jnp.float32)
    # Multiplied, for compilers turn a division by a constant into this or leave it, as they like.
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) * np.float32(1 / _LARGEST)
    numbers = jnp.round(wide / jnp.where(scale == 0, 1.0, scale))
    packed = jnp.clip(numbers, -_LARGEST, _LARGEST).astype(jnp.int8)
    return jnp.concatenate([packed, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def unpack(
    packed: Int8[Array, "*batch head_and_scale"],
) -> tuple[Int8[Array, "*batch head"], Float[Array, "*batch"]]:
    """What `quantise` made: numbers and scales; K and V are their products."""
    numbers, scale = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:]
    return numbers, jax.lax.bitcast_convert_type(scale, jnp.float32)
