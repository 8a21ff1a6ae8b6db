"""The choice of attention for training, by the devices that the program is compiled for."""

from typing import Literal, get_args

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from lockstep.errors import ConfigError
from lockstep.models.attention.training.blockwise import QUERY_BLOCK, blockwise_attention
from lockstep.models.attention.training.causal import CausalAttention, dense_attention
from lockstep.models.attention.training.splash import block_size, splash_attention
from lockstep.placement.device import auto_axes

AttentionBackend = Literal["default", "splash", "jax_flash", "vanilla"]
"""The names of Levanter's ``attn_backend``: by platform, jax's TPU kernel, blockwise, all scores at once."""

type MeshAxes = str | tuple[str, ...] | None
"""The mesh axes that split an axis of an array."""


def check_backend(name: str) -> None:
    """Refuses a name that is none of `AttentionBackend`.

    Args:
        name: The value of ``attn_backend``.

    Raises:
        ConfigError: It is unknown; the message says what there is.
    """
    if name not in get_args(AttentionBackend):
        raise ConfigError(
            f"attn_backend is {name!r}; it must be one of {', '.join(get_args(AttentionBackend))}. Use default: splash "
            "on TPU, jax_flash elsewhere."
        )


def attention_products(backend: AttentionBackend, length: int, window: int | None, *, forwards: int) -> float:
    """The products of a query with keys or values that attention on TPU computes in a train step, per head and query.

    Forward there are two for each key, backward four; the kernel computes scores again in each of its two backward
    passes, and only for blocks that have a key to look at.

    Args:
        backend: The implementation.
        length: The number of positions of a row.
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
    q: Float[Array, "batch position kv_head group head"],
    k: Float[Array, "batch position kv_head head"],
    v: Float[Array, "batch position kv_head head"],
    segment_ids: Int[Array, "batch position"] | None,
    attention: CausalAttention,
    sinks: Float[Array, "kv_head group"] | None = None,
    *,
    backend: AttentionBackend,
    batch_axes: MeshAxes = None,
    head_axes: MeshAxes = None,
) -> Float[Array, "batch position kv_head group head"]:
    """Attends over whole sequences, by the devices of the mesh that is set.

    Args:
        q: The queries; ``group`` of them share a key/value head.
        k: The keys.
        v: The values.
        segment_ids: The document of each position; a query looks at no other document. None: a row is one document.
        attention: The scores.
        sinks: The score of each query head for nothing, which takes a part of its softmax; None for none.
        backend: The implementation; ``default`` is splash on TPU, running or only compiled for, else ``jax_flash``.
        batch_axes: The mesh axes that split the rows.
        head_axes: The mesh axes that split the key/value heads.

    Raises:
        ConfigError: ``splash`` was asked for and the devices are not TPUs.
    """
    # Devices of the program, not of the process: a plan compiles for TPUs on a machine without one.
    mesh = jax.sharding.get_abstract_mesh()
    platform = None if mesh.empty or mesh.abstract_device is None else mesh.abstract_device.platform
    if backend == "vanilla":
        return dense_attention(q, k, v, segment_ids, attention, sinks)
    if backend == "jax_flash" or (backend == "default" and platform != "tpu"):
        return blockwise_attention(q, k, v, segment_ids, attention, sinks)
    if platform != "tpu":
        devices = "no mesh is set" if platform is None else f"the devices of the mesh are of platform {platform!r}"
        raise ConfigError(
            f"model.attn_backend is splash, which is a kernel for TPU, and {devices}. Use default, which is jax_flash "
            "here."
        )
    # XLA cannot split a kernel over devices.
    heads = PartitionSpec(batch_axes, None, head_axes)
    rows = PartitionSpec(batch_axes)
    given = (None if segment_ids is None else rows, None if sinks is None else PartitionSpec(head_axes))
    return jax.shard_map(
        lambda q, k, v, segment_ids, sinks: splash_attention(q, k, v, segment_ids, attention, sinks),
        mesh=mesh,
        in_specs=(heads, heads, heads, *given),
        out_specs=heads,
        axis_names=auto_axes(mesh),
        check_vma=False,  # the kernel does not say over which axes its result varies
    )(q, k, v, segment_ids, sinks)
