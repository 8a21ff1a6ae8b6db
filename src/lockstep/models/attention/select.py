"""The choice of attention for a device, and what that choice means for the KV cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp

from lockstep.models.attention.base import Attention, Heads, Kernel
from lockstep.models.attention.by_heads import AttentionByHeads
from lockstep.models.attention.context_parallel import ContextParallelAttention
from lockstep.models.attention.exact import ExactAttention
from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.tpu import TpuAttention
from lockstep.models.attention.xla import XlaAttention
from lockstep.placement.device import BYTE, FP8, platform_of
from lockstep.printable import get_logger

logger = get_logger(__name__)

KERNELS: Final[Sequence[type[Kernel]]] = (TpuAttention,)
"""The kernels, the better one first where two are for a platform."""


def kernel_of(device: jax.Device, heads: Heads) -> type[Kernel] | None:
    """The kernel for the heads of a device; None where attention is plain JAX."""
    fitting = (kernel for kernel in KERNELS if kernel.platform() == device.platform and kernel.refusal(heads) is None)
    return next(fitting, None)


def has_kernel(device: jax.Device, heads: Heads) -> bool:
    """Whether attention on the device is a kernel that reads K and V in place, from the pages of the pool."""
    return kernel_of(device, heads) is not None


def max_page_table_rows(device: jax.Device, heads: Heads, pages: int) -> int | None:
    """The most rows that the page table of a launch may have; None where no kernel limits them."""
    kernel = kernel_of(device, heads)
    return None if kernel is None else kernel.max_page_table_rows(pages)


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
    platform = device.platform.upper()
    if has_kernel(device, heads):
        return f"{platform} kernel, on the KV cache itself"
    xla = "plain JAX, each decode launch gathers its context once, counted in the temporaries"
    refusals = _refusals(device, heads)
    return f"{xla}; slower than the {platform} kernel, which {refusals[0]}" if refusals else xla


def stored_kv_heads(device: jax.Device, heads: Heads, dtype: jnp.dtype) -> PagedKv:
    """The key/value heads that the pool of a device stores."""
    kernel = kernel_of(device, heads)
    return _plain_attention(device, heads).stored_kv_heads if kernel is None else kernel.kept(heads, dtype)


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
        ConfigError: The kernel of the platform cannot take the heads in this dtype.
    """
    if exact:
        return _plain_attention(device, heads, page_size)
    if heads.context > 1:
        own = select_attention(
            device, heads.at_own_positions, page_size=page_size // heads.context, dtype=dtype, kv_dtype=kv_dtype
        )
        assert isinstance(own, XlaAttention | TpuAttention), "of others, parts cannot be joined"
        return ContextParallelAttention(heads=heads, own=dataclasses.replace(own, partial=True))
    if (kernel := kernel_of(device, heads)) is None:
        for refusal in _refusals(device, heads):
            _warn(device.platform.upper(), refusal)
        return _plain_attention(device, heads)
    kv_dtype = jnp.dtype(dtype if kv_dtype is None else kv_dtype)
    return kernel.make(device.device_kind, heads, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)


def _plain_attention(
    device: jax.Device, heads: Heads, exact_page_size: int | None = None
) -> XlaAttention | AttentionByHeads:
    """Attention in plain JAX; with a page size that of ``numerics: exact``."""

    def of_one_shape(heads: Heads) -> XlaAttention:
        page_by_page = platform_of(device.platform).pages_one_by_one
        if exact_page_size is None:
            return XlaAttention(heads=heads, page_by_page=page_by_page)
        return ExactAttention(heads=heads, page_by_page=page_by_page, page_size=exact_page_size)

    if heads.by_layer is None:
        return of_one_shape(heads)
    return AttentionByHeads(by_layer=tuple(map(of_one_shape, heads.by_layer)))


def _refusals(device: jax.Device, heads: Heads) -> list[str]:
    """Why the kernels of the device's platform do not take the heads."""
    refusals = (kernel.refusal(heads) for kernel in KERNELS if kernel.platform() == device.platform)
    return [refusal for refusal in refusals if refusal is not None]


@functools.cache
def _warn(platform: str, refusal: str) -> None:
    logger.warning(
        "the %s attention kernel %s: attention is compiled from plain JAX instead. Each decode launch copies the "
        "context of its sequences, which takes as much memory as their KV cache and is slower; the memory is accounted "
        "for.",
        platform,
        refusal,
    )
