"""The training forward of ``numerics: exact``: log-probabilities of whole sequences by the decoder's own functions."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from lockstep.engine.decoder.exact_proof import prove_exact
from lockstep.engine.decoder.prefill import chunks
from lockstep.engine.decoder.transformer import Past, Sequences, Transformer, of_experts
from lockstep.engine.sampling.logprobs import target_logprobs
from lockstep.errors import ConfigError
from lockstep.models import (
    TENSOR_DIMS,
    WEIGHT_AXES,
    DecoderWeights,
    LlamaConfig,
    MergeLora,
    block,
    unpacked_experts,
)
from lockstep.models.attention import attend_documents, attend_exact, contiguous_blocks
from lockstep.placement import PARAMETER_AXES, DecodeMesh, LazyWeight, LeafLayout, partition_specs
from lockstep.placement.device import barrier


class ExactForward(NamedTuple):
    """The result of `exact_logprobs`."""

    logprobs: Float[Array, "row target"]
    stream: Float[Array, "layer row position embed"]
    """The residual stream after each layer."""
    experts: Int[Array, "row position layer choice"] | None
    """The experts of each token, -1 in a layer that has none; None where the model has none."""


def exact_logprobs(
    config: LlamaConfig,
    weights: DecoderWeights,
    tokens: Int[Array, "row position"],
    *,
    segment_ids: Int[Array, "row position"] | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    replayed: Int[Array, "row position layer choice"] | None = None,
) -> ExactForward:
    """Return the log-probability of each token but the first, with the bits that the engine has for it.

    It is computed on the mesh that is set, a training mesh or any other, each device its own rows, with the weights
    gathered layer by layer; on one device where none is set. It has no gradient.

    Args:
        weights: The weights, in the dtype to compute in; those with adapters are merged layer by layer.
        tokens: Token ids; a row is one sequence from its first position on.
        segment_ids: The document of each token, where a row is packed with several; None: a row is one.
        vocab_size: The number of ids that are tokens, from 0; None for all rows of the embedding.
        replayed: The experts to take (`lockstep.models.route`).

    Raises:
        ConfigError: The numerics are not exact on these devices (`prove_exact`), or a weight is made of others in a way
            that is not known.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    names = () if mesh.empty else mesh.axis_names
    check_exact_dtype(weights.embed.dtype)
    device = None if mesh.empty else mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    prove_exact(config, weights.embed.shape[0], weights.embed.dtype, platform)
    tensor = tuple(name for name in names if name == PARAMETER_AXES["vocab"])
    decode_mesh = DecodeMesh(
        mesh=mesh,
        training_shape=dict(mesh.shape),
        replica_axes=tuple(name for name in names if name not in tensor),
        tensor_axes=tensor,
        context_axes=(),
        training_axes={name: (name,) for name in names},
    )

    weights = exact_merges(config, weights, weights.embed.dtype)
    layouts = _layouts(weights, decode_mesh)
    transformer = Transformer(
        config=config,
        decode_mesh=decode_mesh,
        layouts=layouts,
        pages=0,
        vocab_size=weights.embed.shape[0] if vocab_size is None else min(vocab_size, weights.embed.shape[0]),
        routed=of_experts(config),
    )

    def compute(
        weights: DecoderWeights, tokens: Array, segment_ids: Array | None, replayed: Array | None
    ) -> ExactForward:
        return _logprobs(transformer, weights, tokens, temperature, segment_ids, replayed)

    if names:
        rows = PartitionSpec(decode_mesh.replica_axes if len(tokens) % decode_mesh.replicas == 0 else None)
        specs: Any = rows, PartitionSpec(None, *rows), rows
        compute = jax.shard_map(
            compute,
            mesh=mesh,
            in_specs=(partition_specs(layouts), rows, rows, rows),
            out_specs=ExactForward(*specs),
            check_vma=False,
        )
    parts = jax.tree.map(lambda leaf: leaf.parts if isinstance(leaf, LazyWeight) else leaf, weights)
    return compute(*jax.lax.stop_gradient((parts, tokens, segment_ids, replayed)))


def _layouts(weights: DecoderWeights, decode_mesh: DecodeMesh) -> Any:
    """The layouts of weights that are where a training mesh has them."""

    def layout(path: tuple[Any, ...], leaf: Array | LazyWeight) -> LeafLayout | _MergedLayout:
        name = path[-1].name
        split = [PARAMETER_AXES.get(axis, "") for axis in WEIGHT_AXES[name]]
        spec = tuple((axis,) if axis in decode_mesh.training_axes else () for axis in split)
        leaf_layout = LeafLayout(decode_mesh, spec, TENSOR_DIMS.get(name))
        if not isinstance(leaf, LazyWeight):
            return leaf_layout
        if not isinstance(leaf.assemble, MergeLora):
            raise ConfigError(f"numerics is exact, and the weight {name} is made of others. Set numerics to fast.")
        return _MergedLayout(leaf_layout, leaf.assemble, weights.embed.dtype)

    return jax.tree_util.tree_map_with_path(layout, weights)


@dataclasses.dataclass(frozen=True)
class _MergedLayout:
    """The layout of a stacked weight that is merged with its adapter when a layer is read."""

    values: LeafLayout  # of the weight
    merge: MergeLora
    dtype: jnp.dtype  # of the merged weight

    @property
    def partition_spec(self) -> tuple[PartitionSpec, ...]:
        """The partition specs of the weight and the two factors, which have a first axis of layers."""
        own = self.values.partition_spec
        return own, *(PartitionSpec(own[0], *axes) for axes in self.merge.factor_specs(own[1:], None))

    @property
    def decode(self) -> LeafLayout:
        """The merged weight in the decode layout, in which this one never is."""
        return self.values.decode

    def drop_layer(self) -> "_MergedLayout":
        """The layout of one layer."""
        return dataclasses.replace(self, values=self.values.drop_layer())

    def read(self, parts: tuple[Array, Array, Array]) -> Array:
        """Inside ``shard_map``: this device's part in the decode layout, from its blocks of the three."""
        return self.values.read(self.merge(*parts).astype(self.dtype))


def _logprobs(
    transformer: Transformer,
    weights: DecoderWeights,
    tokens: Array,
    temperature: float,
    segment_ids: Array | None,
    replayed: Array | None,
) -> ExactForward:
    rows, length = tokens.shape
    weights = transformer.read_outer(weights)
    heads = transformer.heads
    position, first = jnp.broadcast_to(jnp.arange(length), tokens.shape), None
    if segment_ids is not None:
        first = block.document_starts(segment_ids)
        position -= first

    type Cache = tuple[Array, Array]  # K and V of a layer, which reads its own alone, and the stream after each

    def write(cache: Cache, layer: Array, kv: Array) -> Cache:
        return kv, cache[1]

    def attend(cache: Cache, layer: Array, q: Array, sinks: Array | None) -> Array:
        k, v = (rows.swapaxes(1, 2) for rows in heads.kept.split(cache[0]))
        if first is not None:
            return attend_documents(q, k, v, first, heads.modifier_of(layer), sinks)
        return attend_exact(q, position, *contiguous_blocks(k, v), heads.modifier_of(layer), sinks)

    x = transformer.embed(weights, tokens)
    kv = jnp.zeros((rows, length, *heads.kept.shape), x.dtype)
    stream = jnp.zeros((transformer.config.num_layers, *x.shape), x.dtype)
    past = Past(write, attend, after=lambda cache, layer, x: (cache[0], cache[1].at[layer].set(x)))
    sequences = Sequences(jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool), position)
    x, (_, stream), words = transformer.layers(weights.layers, x, (kv, stream), past, sequences, replayed=replayed)

    def chunk(part: tuple[Array, Array]) -> Array:
        states, targets = part
        # A division by a constant would be another multiplication.
        logits = barrier(barrier(transformer.logits(weights, states)) / barrier(jnp.float32(temperature)))
        return target_logprobs(logits, targets, transformer.decode_mesh, exact=True).logprob

    targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
    logprobs = jax.lax.map(chunk, (chunks(x.reshape(-1, x.shape[-1])), chunks(targets)))
    logprobs = logprobs.reshape(-1)[: targets.size].reshape(tokens.shape)[:, :-1]
    logprobs = jnp.maximum(logprobs, jnp.finfo(jnp.float32).min)  # an id that is no token has none
    if (shape := transformer.routed) is None or words is None:
        return ExactForward(logprobs, stream, None)
    return ExactForward(logprobs, stream, unpacked_experts(words, shape.dtype, shape.layers, shape.choices))


def exact_merges(config: LlamaConfig, weights: DecoderWeights, dtype: jnp.dtype) -> DecoderWeights:
    """Return weights of which those with adapters are merged as ``numerics: exact`` needs it, if that is what it is.

    Args:
        weights: Arrays, shape structs and `LazyWeight`.
        dtype: The type that is computed in.
    """

    def exact(leaf: Any) -> Any:
        if not (config.exact and isinstance(leaf, LazyWeight) and isinstance(leaf.assemble, MergeLora)):
            return leaf
        return dataclasses.replace(leaf, assemble=dataclasses.replace(leaf.assemble, exact=jnp.dtype(dtype).name))

    merged: DecoderWeights = jax.tree.map(exact, weights)
    return merged


def check_exact_dtype(dtype: jnp.dtype) -> None:
    """Refuse ``numerics: exact`` in types that no test has, such as float16."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ConfigError(
            f"numerics is exact, which is tested in bfloat16 and float32, not in {dtype}. Use one of them, or set "
            "numerics to fast."
        )
