"""The choice of attention for a device, and what that choice means for the KV cache.

A new kernel is a file with its `Attention`, and a branch in each function here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lockstep.errors import ConfigError
from lockstep.models.attention.base import Attention, Heads
from lockstep.models.attention.context_parallel import ContextParallelAttention
from lockstep.models.attention.exact import ExactAttention
from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.tpu import TpuAttention
from lockstep.models.attention.tpu_blocks import (
    LANES,
    BlockKey,
    blocks_for,
    max_table_rows,
    stored_head_size,
    stored_heads,
    takes,
    tpu_generation,
)
from lockstep.models.attention.xla import XlaAttention
from lockstep.placement.device import BYTE, FP8, platform_of
from lockstep.printable import get_logger

logger = get_logger(__name__)


def has_kernel(device: jax.Device, heads: Heads) -> bool:
    """Whether attention on the device is a kernel that reads K and V in place, from the pages of the pool.

    True on TPUs, running ones and those that can only be compiled for, for K and V of at most `LANES` elements: jax's
    kernel steps through rows of `LANES` elements and does not compile for wider heads on any generation.
    """
    return device.platform == "tpu" and heads.head_size <= LANES and heads.value_size is None


def max_page_table_rows(device: jax.Device, heads: Heads, pages: int) -> int | None:
    """The most rows that the page table of a launch may have; None where no kernel reads it from scalar memory."""
    return max_table_rows(pages) if has_kernel(device, heads) else None


def pool_dtype(device: jax.Device, heads: Heads, kv_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of the array that holds the pool: bytes for K and V in 8 bits that no kernel reads and writes."""
    return BYTE if kv_dtype == FP8 and not has_kernel(device, heads) else kv_dtype


def describe_attention(device: jax.Device, heads: Heads, *, exact: bool = False) -> str:
    """Describe the attention on a device, for the report of the chosen sizes.

    Args:
        exact: Whether it is that of ``numerics: exact``.
    """
    if exact:
        return "plain JAX, 128 keys at a time, the same in training"
    if heads.context > 1:
        own = describe_attention(device, heads.at_own_positions)
        return f"{own}; the positions of a sequence are split over {heads.context} devices"
    if has_kernel(device, heads):
        return "TPU kernel, on the KV cache itself"
    xla = "plain JAX, each decode launch gathers its context once, counted in the temporaries"
    if device.platform != "tpu":
        return xla
    return f"{xla}; slower than the TPU kernel, which {_refusal(heads)}"


def stored_kv_heads(device: jax.Device, heads: Heads, dtype: jnp.dtype) -> PagedKv:
    """The key/value heads that the pool of a device stores."""
    if not has_kernel(device, heads):
        return _xla_attention(device, heads).stored_kv_heads
    return PagedKv(
        kv_heads=stored_heads(heads.kv_heads, jnp.dtype(dtype).itemsize),
        head_size=stored_head_size(heads.head_size),
    )


def select_attention(
    device: jax.Device,
    heads: Heads,
    *,
    page_size: int,
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype | None = None,
    exact: bool = False,
) -> Attention:
    """Select the attention for a device, by its platform and the size of the heads.

    Args:
        device: A device of the decode mesh; all are of one kind.
        kv_dtype: The dtype of the pool; None for that of the queries.
        exact: Whether it is that of ``numerics: exact``.

    Raises:
        ConfigError: The TPU kernel cannot take the heads in this dtype.
    """
    if exact:
        return ExactAttention(
            heads=heads, page_by_page=platform_of(device.platform).pages_one_by_one, page_size=page_size
        )
    if heads.context > 1:
        own = select_attention(
            device, heads.at_own_positions, page_size=page_size // heads.context, dtype=dtype, kv_dtype=kv_dtype
        )
        assert isinstance(own, XlaAttention | TpuAttention)
        return ContextParallelAttention(heads=heads, own=dataclasses.replace(own, partial=True))
    if not has_kernel(device, heads):
        if device.platform == "tpu":
            _warn(_refusal(heads))
        return _xla_attention(device, heads)
    kv_dtype = jnp.dtype(dtype if kv_dtype is None else kv_dtype)
    pool = stored_kv_heads(device, heads, kv_dtype)
    key = BlockKey(
        generation=tpu_generation(device.device_kind),
        q_heads=pool.kv_heads * heads.group,
        kv_heads=pool.kv_heads,
        head_size=pool.head_size,
        page_size=page_size,
        dtype=jnp.dtype(dtype).name,
        kv_dtype=kv_dtype.name,
    )
    if not takes(key.q_heads, key.kv_heads, kv_dtype.itemsize):
        raise ConfigError(
            f"the TPU attention kernel cannot take {key.q_heads} query heads and {key.kv_heads} kv heads per device in "
            f"{key.dtype}: in {8 * jnp.dtype(dtype).itemsize} bits, 4 kv heads must serve a multiple of 8 query heads. "
            "Set dtype to bfloat16, or layout to {tensor: N} with an N that leaves at most 4 kv heads to a device."
        )
    decode, prefill = blocks_for(key)
    return TpuAttention(
        heads=heads, stored_kv_heads=pool, page_size=page_size, decode_blocks=decode, prefill_blocks=prefill
    )


def _xla_attention(device: jax.Device, heads: Heads) -> XlaAttention:
    return XlaAttention(heads=heads, page_by_page=platform_of(device.platform).pages_one_by_one)


def _refusal(heads: Heads) -> str:
    """Why the TPU kernel does not take the heads."""
    if heads.value_size is not None:
        return f"takes K and V, and here is a latent of both, of {heads.head_size} numbers"
    return f"takes heads of at most {LANES} numbers, and here are {heads.head_size}"


@functools.cache
def _warn(refusal: str) -> None:
    logger.warning(
        "the TPU attention kernel %s: attention is compiled from plain JAX instead. Each decode launch copies the "
        "context of its sequences, which takes as much memory as their KV cache and is slower; the memory is accounted "
        "for.",
        refusal,
    )
