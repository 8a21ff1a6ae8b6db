"""Which attention a device runs."""

import functools
import logging

import jax
import jax.numpy as jnp

from lockstep.attention.base import Attention, Heads, StoredKvHeads
from lockstep.attention.tpu import RaggedAttention
from lockstep.attention.tpu_blocks import LANES, BlockKey, blocks_for, generation, stored_head_size, stored_heads, takes
from lockstep.attention.xla import PlainAttention
from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)


def has_kernel(device: jax.Device, head_size: int) -> bool:
    """Whether attention on the device is a kernel that reads K and V where they lie.

    On TPUs, running ones and those that can only be compiled for, and for heads of at most `LANES` numbers: of wider
    ones jax's kernel does not compile on any generation, for it can step through rows of `LANES` numbers alone.

    Args:
        device: of the decode mesh.
        head_size: of the model.
    """
    return device.platform == "tpu" and head_size <= LANES


def attention_text(device: jax.Device, head_size: int) -> str:
    """What attention on the device is, in words."""
    if has_kernel(device, head_size):
        return "TPU kernel, on the KV cache itself"
    plain = "plain JAX, each decode launch lays its context out once, counted in the temporaries"
    if device.platform != "tpu":
        return plain
    return (
        f"{plain}; slower than the TPU kernel, which takes heads of at most {LANES} numbers, and here are {head_size}"
    )


def stored(device: jax.Device, heads: Heads, dtype: jnp.dtype) -> StoredKvHeads:
    """Heads of the pool on a device.

    Args:
        device: of the decode mesh.
        heads: of the model, on one device.
        dtype: of the pool.
    """
    if not has_kernel(device, heads.head_size):
        return PlainAttention(heads=heads, int8=dtype == jnp.int8).stored
    return StoredKvHeads(
        kv_heads=stored_heads(heads.kv_heads, jnp.dtype(dtype).itemsize),
        head_size=stored_head_size(heads.head_size),
    )


def check_cache_dtype(device: jax.Device, kv_cache_dtype: str) -> None:
    """Refuses a KV cache that attention on the device cannot read in place.

    Raises:
        ConfigError: int8 on a TPU.
    """
    if kv_cache_dtype == "int8" and device.platform == "tpu":
        raise ConfigError(
            f"kv_cache_dtype is int8 and the devices are {device.device_kind}: the attention kernel there takes one "
            "scale for a whole launch, and int8 here has one for each token and head. Without the kernel each decode "
            "launch would copy its context, which takes the memory that int8 saves. Set kv_cache_dtype to auto."
        )


def select_attention(
    device: jax.Device, heads: Heads, *, page_size: int, dtype: jnp.dtype, kv_dtype: jnp.dtype | None = None
) -> Attention:
    """The attention for a device, by its platform and the size of the heads.

    Args:
        device: of the decode mesh; all are of one kind.
        heads: of the model, on one device.
        page_size: tokens in a page.
        dtype: of queries.
        kv_dtype: of the pool: int8, or that of the queries, as with None.
    """
    if not has_kernel(device, heads.head_size):
        if device.platform == "tpu":
            _warn(heads.head_size)
        return PlainAttention(heads=heads, int8=kv_dtype == jnp.int8, page_by_page=device.platform == "tpu")
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


@functools.cache
def _warn(head_size: int) -> None:
    logger.warning(
        "the TPU attention kernel takes heads of at most %d numbers, and the model's have %d: attention is compiled "
        "from plain JAX instead. Each decode launch copies the context of its sequences, which takes as much memory as "
        "their KV cache and is slower; the memory is accounted for.",
        LANES,
        head_size,
    )
