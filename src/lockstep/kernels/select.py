"""Which attention a device runs."""

import jax
import jax.numpy as jnp

from lockstep.errors import ConfigError
from lockstep.kernels.attention import Attention, Heads, Stored
from lockstep.kernels.plain import PlainAttention
from lockstep.kernels.ragged_tpu import RaggedAttention
from lockstep.kernels.tpu_blocks import BlockKey, blocks_for, generation, stored_head_size, stored_heads, takes


def has_kernel(device: jax.Device) -> bool:
    """Whether attention on the device is a kernel: on TPUs, running ones and those that can only be compiled for."""
    return device.platform == "tpu"


def stored(device: jax.Device, heads: Heads, dtype: jnp.dtype) -> Stored:
    """Heads of the pool on a device.

    Args:
        device: of the decode grid.
        heads: of the model, on one device.
        dtype: of the pool.
    """
    if not has_kernel(device):
        return PlainAttention(heads=heads, int8=dtype == jnp.int8).stored
    return Stored(
        kv_heads=stored_heads(heads.kv_heads, jnp.dtype(dtype).itemsize),
        head_size=stored_head_size(heads.head_size),
    )


def check_cache_dtype(device: jax.Device, kv_cache_dtype: str) -> None:
    """Refuses a KV cache that attention on the device cannot read in place.

    Raises:
        ConfigError: int8 where attention is a kernel.
    """
    if kv_cache_dtype == "int8" and has_kernel(device):
        raise ConfigError(
            f"kv_cache_dtype is int8 and the devices are {device.device_kind}: the attention kernel there takes one "
            "scale for a whole launch, and int8 here has one for each token and head. Without the kernel each decode "
            "launch would copy its context, which takes the memory that int8 saves. Set kv_cache_dtype to auto."
        )


def select_attention(
    device: jax.Device, heads: Heads, *, page_size: int, dtype: jnp.dtype, kv_dtype: jnp.dtype | None = None
) -> Attention:
    """The attention for a device, by its platform.

    Args:
        device: of the decode grid; all are of one kind.
        heads: of the model, on one device.
        page_size: tokens in a page.
        dtype: of queries.
        kv_dtype: of the pool: int8, or that of the queries, as with None.
    """
    if not has_kernel(device):
        return PlainAttention(heads=heads, int8=kv_dtype == jnp.int8)
    pool = stored(device, heads, dtype)
    key = BlockKey(
        generation=generation(device.device_kind),
        q_heads=pool.kv_heads * heads.group,
        kv_heads=pool.kv_heads,
        head_size=pool.head_size,
        page_size=page_size,
        dtype=jnp.dtype(dtype).name,
    )
    if not takes(key.q_heads, key.kv_heads, jnp.dtype(dtype).itemsize):
        raise ConfigError(
            f"the TPU attention kernel cannot take {key.q_heads} query heads and {key.kv_heads} kv heads per device in "
            f"{key.dtype}: in {8 * jnp.dtype(dtype).itemsize} bits, 4 kv heads must serve a multiple of 8 query heads. "
            "Set dtype to bfloat16, or layout to {tensor: N} with an N that leaves at most 4 kv heads to a device."
        )
    decode, prefill = blocks_for(key)
    return RaggedAttention(heads=heads, stored=pool, page_size=page_size, decode_blocks=decode, prefill_blocks=prefill)
