"""The choice of attention for training, by the devices that the program is compiled for."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SplashAttentionKernel
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from lockstep.errors import ConfigError
from lockstep.models.attention.training.causal import (
    QUERY_BLOCK,
    CausalAttention,
    HeadArrays,
    Queries,
    blockwise_attention,
    dense_attention,
)
from lockstep.models.attention.training.context import SplitPositions
from lockstep.models.attention.training.splash import LANES, block_size, splash_attention, splash_kernel
from lockstep.placement.device import auto_axes, platform_of

AttentionBackend = Literal["default", "splash", "jax_flash", "vanilla"]
"""The names of Levanter's ``attn_backend``: by platform, jax's TPU kernel, blockwise, all scores at once."""

type MeshAxes = str | tuple[str, ...] | None
"""The mesh axes that split an axis of an array."""


def attention_products(backend: AttentionBackend, length: int, window: int | None, *, forwards: int) -> float:
    """The products of a query with keys or values that attention on TPU computes in a train step, per head and query.

    Forward there are two for each key, backward four; the kernel computes scores again in each of its two backward
    passes, and only for blocks that have a key to look at.

    Args:
        window: The sliding window; None for none.
        forwards: The number of times that the forward pass is computed.
    """
    if backend == "vanilla" or (backend == "jax_flash" and length <= QUERY_BLOCK):
        return float(length * (2 * forwards + 4))
    if backend == "jax_flash":
        return float(length * (2 * forwards + 2 + 4))
    block = block_size(length)
    keys = min((length + block) / 2, float(length if window is None else window + block))
    return keys * (2 * forwards + 3 + 4)


def self_attention(
    arrays: HeadArrays,
    attention: CausalAttention,
    *,
    backend: AttentionBackend,
    split: SplitPositions | None = None,
    batch_axes: MeshAxes = None,
    head_axes: MeshAxes = None,
    interpret: bool = False,
) -> Float[Array, "batch position kv_head group value"]:
    """Attend over whole sequences, by the devices of the mesh that is set.

    Args:
        backend: The implementation; ``default`` is splash on TPU, running or only compiled for, else ``jax_flash``.
        split: The devices that share a row, whose positions are in its `SplitPositions.order`; None: each has whole
            rows, in order.
        interpret: Whether to run splash without a TPU, slowly, for tests.

    Raises:
        ConfigError: ``splash`` was asked for and the devices are not TPUs; it cannot split rows of this length.
    """
    # Devices of the program, not of the process: a plan compiles for TPUs on a machine without one.
    mesh = jax.sharding.get_abstract_mesh()
    platform = None if mesh.empty or mesh.abstract_device is None else mesh.abstract_device.platform
    runs = platform is not None and platform_of(platform).splash
    splash = backend == "splash" or (backend == "default" and runs)
    plain = dense_attention if backend == "vanilla" else blockwise_attention
    if not splash and split is None:
        return plain(arrays, attention)
    if splash and not runs and not interpret:
        devices = "no mesh is set" if platform is None else f"the devices of the mesh are of platform {platform!r}"
        raise ConfigError(
            f"model.attn_backend is splash, which is a kernel for TPU, and {devices}. Use default, which is jax_flash "
            "here."
        )
    order, positions, kernel, kernel_spec = None, None, None, None
    if split is not None:
        order, positions = jnp.asarray(split.order), split.axis
        if splash:
            kernel, kernel_spec = _split_kernel(arrays.q, attention, split, head_axes, interpret)

    def local(arrays: HeadArrays, *own: Any) -> Float[Array, "batch query kv_head group value"]:
        if split is None:
            return splash_attention(arrays, attention, interpret=interpret)
        order, query_segments, kernel = own
        segments = None if arrays.segment_ids is None else split.joined(arrays.segment_ids)
        arrays = HeadArrays(arrays.q, split.joined(arrays.k), split.joined(arrays.v), segments, arrays.sinks)
        if splash:
            return splash_attention(arrays, attention, query_segments=query_segments, kernel=kernel)
        return plain(arrays, attention, Queries(order, query_segments))

    # XLA cannot split a kernel over devices. For a split row it gathers keys, values and segment ids.
    whole, rows = PartitionSpec(batch_axes, None, head_axes), PartitionSpec(batch_axes)
    queries = PartitionSpec(batch_axes, positions, head_axes)
    specs: Any = queries, whole, whole, rows, PartitionSpec(head_axes)
    own = (PartitionSpec(positions), PartitionSpec(batch_axes, positions), kernel_spec)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(HeadArrays(*specs), *own),
        out_specs=queries,
        axis_names=auto_axes(mesh),
        check_vma=False,  # the kernel does not say over which axes its result varies
    )(arrays, order, arrays.segment_ids, kernel)


def _split_kernel(
    q: Array, attention: CausalAttention, split: SplitPositions, head_axes: MeshAxes, interpret: bool
) -> tuple[SplashAttentionKernel, Any]:
    """The kernel of a split row, and how it is sharded."""
    pieces = 2 * split.devices
    if split.length % (pieces * LANES):
        raise ConfigError(
            f"rows have {split.length} positions, and splash attention needs {pieces} pieces of a multiple of {LANES} "
            f"for {split.axis}={split.devices} in trainer.mesh_shape. Make data.max_seq_len a multiple of "
            f"{pieces * LANES}."
        )
    mesh = jax.sharding.get_abstract_mesh()
    names = (head_axes,) if isinstance(head_axes, str) else head_axes or ()
    heads = q.shape[2] * q.shape[3] // math.prod(mesh.shape[name] for name in names)
    kernel = splash_kernel(split.length, heads, attention, split=split, interpret=interpret)
    return kernel, kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, split.axis)))
