"""The 8-bit KV cache: integers from -127 to 127 with a float32 scale for each position and head, side by side.

A head of ``n`` elements is ``n + 4`` bytes; the last four are its scale. So the pool is one int8 array, and copies,
slices and shardings of it include the scales. Four zero bytes are the scale 0.

This file is everything that the package knows of the format; `lockstep.attention.select` chooses it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from lockstep.errors import ConfigError

_SCALE_BYTES = 4
_LARGEST = 127


@dataclasses.dataclass(frozen=True)
class Int8Kv:
    """K and V rounded to 8 bits once, when they are written; every reader sees the same rounded numbers.

    The matrix products use the integers, which every float dtype holds exactly. The scales belong to positions, so they
    multiply scores and softmax weights instead, in float32.
    """

    def stored_head_size(self, head_size: int) -> int:
        """The head size and the four bytes of its scale."""
        return head_size + _SCALE_BYTES

    def pack(self, kv: Float[Array, "*batch head"]) -> Int8[Array, "*batch head_and_scale"]:
        """Rounds a head to multiples of its scale, a 127th of its largest magnitude: the error is at most half a scale.

        A head of zeros has the scale 0. A head with an infinite or NaN element has a scale that is not finite either,
        so that readers get NaN.
        """
        wide = kv.astype(jnp.float32)
        # A product, because some compilers turn a division by a constant into one and others do not.
        scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) * np.float32(1 / _LARGEST)
        integers = jnp.round(wide / jnp.where(scale == 0, 1.0, scale))
        packed = jnp.clip(integers, -_LARGEST, _LARGEST).astype(jnp.int8)
        return jnp.concatenate([packed, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)

    def unpack(
        self, packed: Int8[Array, "*batch head_and_scale"]
    ) -> tuple[Int8[Array, "*batch head"], Float[Array, "*batch"]]:
        """Splits what `pack` made into integers and float32 scales; K or V is their product."""
        integers, scale = packed[..., :-_SCALE_BYTES], packed[..., -_SCALE_BYTES:]
        return integers, jax.lax.bitcast_convert_type(scale, jnp.float32)

    def scores(self, q: Array, k: Array, scale: float) -> Array:
        """The product with the integers, times the scales of the positions."""
        integers, k_scale = self.unpack(k)
        products = jnp.einsum("skqh,skth->skqt", q, integers.astype(q.dtype), preferred_element_type=jnp.float32)
        return products * (k_scale * scale)[:, :, None]

    def weigh(self, weights: Array, v: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
        """The weights times the scales of the positions, and the integers."""
        integers, v_scale = self.unpack(v)
        dtype = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype  # such small products underflow in float16
        return (weights * v_scale[:, :, None]).astype(dtype), integers.astype(dtype)


def check_cache_dtype(device: jax.Device, kv_cache_dtype: str) -> None:
    """Refuses a KV cache that attention on the device cannot read in place.

    Args:
        device: A device of the decode mesh.
        kv_cache_dtype: ``auto`` or ``int8``, as in `EngineConfig`.

    Raises:
        ConfigError: The cache is int8 and the device is a TPU.
    """
    if kv_cache_dtype == "int8" and device.platform == "tpu":
        raise ConfigError(
            f"kv_cache_dtype is int8 and the devices are {device.device_kind}: the attention kernel there takes one "
            "scale for a whole launch, and int8 here has one for each token and head. Without the kernel each decode "
            "launch would copy its context, which takes the memory that int8 saves. Set kv_cache_dtype to auto."
        )
