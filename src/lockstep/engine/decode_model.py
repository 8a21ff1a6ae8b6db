"""A model in one decode layout, as sizing and programs see it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.engine.config import EngineConfig, Layout, context_size, layout_text, tensor_size, whole_experts
from lockstep.engine.decoder.forward import check_exact_dtype, exact_merges
from lockstep.engine.decoder.heads import device_heads, kept_by_layer
from lockstep.engine.decoder.states import state_spec
from lockstep.engine.idle_replicas import count_active, layout_with_idle_replicas
from lockstep.engine.replicated_kv_heads import replicate_kv_heads, replicates_kv_heads
from lockstep.errors import ConfigError
from lockstep.models import STACKED, DecoderWeights, LlamaConfig, part_lanes, quantized_dims, tensor_dims
from lockstep.models.attention import Heads, check_context, stored_kv_heads
from lockstep.models.attention.kv import KvSpec, PagedKv
from lockstep.placement import (
    DecodeMesh,
    LayoutTree,
    LeafLayout,
    QuantizedLayout,
    is_lazy,
    leaf_layouts,
    make_decode_mesh,
    quantized_layouts,
    shape_structs,
    tensor_sizes,
)
from lockstep.placement.device import blocks_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight of a model in a layout.

    Args:
        layers: The number of layers that have it, its first axis; 0 for none.
        in_place: Whether the trainer has it where decoding wants it.
        decode_size: Numbers on each device in the decode layout.
        decode_bytes: Bytes on each device in the decode layout and dtype, with the scales of 8 bits.
        training_bytes: Bytes on each device where the trainer has it, in the decode dtype.
    """

    name: str
    layers: int
    in_place: bool
    decode_size: int
    decode_bytes: int
    training_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeModel:
    """A model as one layout decodes it. It has no arrays, so that it may outlive the weights that it describes.

    Args:
        config: The configuration of the model, with kv heads replicated where the layout needs that.
        weights: Shape structs and `LazyWeight` of such, with the trainer's shardings and kv heads replicated.
        quantized_dtype: The 8-bit dtype of the weights of the layers' matrix products; None where it is ``dtype``.
        kept: What each layer keeps of the past on a device, as the pool has it.
        whole_experts: Whether devices of a replica have whole experts, in place of a part of the width of each.
        layouts: The layout of each weight: where the trainer has it, and where decoding wants it.
        lazy: Whether any weight has yet to be made from what the trainer has.
        casts: Whether any parameter has another dtype than decoding uses, such as 8 bits.
        moves: Whether weights move into the decode layout once per round; otherwise they stay in the trainer's.
        copied_bytes: Bytes per device of the copy of the weights that decoding needs; 0 where it needs none.
        gathered: The weights that the layout ``training`` gathers anew at each step.
    """

    layout: Layout
    config: LlamaConfig
    weights: DecoderWeights
    decode_mesh: DecodeMesh
    active_replicas: int
    device: jax.Device
    heads: Heads
    dtype: jnp.dtype
    quantized_dtype: jnp.dtype | None
    kv_dtype: jnp.dtype
    kept: tuple[KvSpec, ...]
    whole_experts: bool
    layouts: LayoutTree
    leaves: tuple[Weight, ...]
    lazy: bool
    casts: bool
    moves: bool
    copied_bytes: int
    gathered: tuple[Weight, ...]

    @functools.cached_property
    def kv_bytes(self) -> int:
        """Bytes per device of a position in all layers, on average where positions are split."""
        return sum(layer.position_bytes(self.kv_dtype) for layer in self.kept) // self.heads.context

    @property
    def paged_layers(self) -> int:
        """The number of layers that keep rows in pages of the pool."""
        return sum(isinstance(layer, PagedKv) for layer in self.kept)

    @functools.cached_property
    def sequence_bytes(self) -> int:
        """Bytes per device of a sequence in all layers beside those of its positions."""
        return sum(layer.sequence_bytes(self.kv_dtype) for layer in self.kept)

    @property
    def copies(self) -> bool:
        """Whether decoding needs a copy of the weights."""
        return self.moves or self.lazy or self.casts


class DecodeModels:
    """A model in every layout that it may be decoded in; each `DecodeModel` is made when it is first asked for."""

    def __init__(self, engine: EngineConfig, config: LlamaConfig, weights: DecoderWeights, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.signature = signature_of(config, weights)
        self._engine = engine
        self._weights = shape_structs(weights)
        self._made: dict[str, DecodeModel] = {}

    def __getitem__(self, layout: Layout) -> DecodeModel:
        """The model in a layout other than ``auto``.

        Raises:
            ConfigError: The layout does not suit the mesh, the model or where its weights are placed.
        """
        name = layout_text(layout)
        if name not in self._made:
            self._made[name] = self._make(layout)
        return self._made[name]

    @property
    def layouts(self) -> list[Layout]:
        """The layouts to compare: the configured one, or all that the mesh and the model allow."""
        return self.possible if self._engine.layout == "auto" else _with_experts(self.config, self._engine.layout)

    @functools.cached_property
    def possible(self) -> list[Layout]:
        """All layouts that the mesh and the model allow; of dense models, but for those that replicate kv heads.

        More devices than kv heads keep K and V several times. That is worth it for experts, which are most of the
        weights; elsewhere where somebody asks for it, or where they split the positions instead.
        """
        kv_heads, kept, experts = self.config.num_kv_heads, self.config.kept_kv_heads, self.config.experts
        nested = tensor_sizes(self.mesh)
        sizes = [size for size in nested if size <= kv_heads or (experts and self._can({"tensor": size}))]
        split = [{"tensor": size, "context": size // kept} for size in nested if size > kept]
        idle = layout_with_idle_replicas(list(self.mesh.devices.flat))
        ways = (way for size in sizes for way in _with_experts(self.config, {"tensor": size}))
        return [
            *(way for way in ways if _fits(self.config, way)),
            *(way for layout in split for way in _with_experts(self.config, layout) if self._can(way)),
            *([] if idle is None else [idle]),
            *(["training"] if self._can("training") else []),
        ]

    def _can(self, layout: Layout) -> bool:
        """Whether weights can be read so: the trainer may have cut a kv head, or split layers into stages."""
        try:
            return _fits(self.config, layout) and self[layout] is not None
        except ConfigError:
            return False

    def _make(self, layout: Layout) -> DecodeModel:
        tensor = tensor_size(layout) or 1
        decode_mesh = make_decode_mesh(self.mesh, tensor, context_size(layout))
        check_layout(self.config, layout, decode_mesh)
        dtype = jnp.dtype(self._engine.dtype or self._weights.embed.dtype)
        config, weights = replicate_kv_heads(self.config, exact_merges(self.config, self._weights, dtype), tensor)
        kv_dtype = self._engine.kv_dtype(dtype)
        if config.exact:
            check_exact_dtype(dtype)
            self._check_exact(layout, decode_mesh)
        device, heads = self.mesh.devices.flat[0], device_heads(config, decode_mesh)
        copies = max(1, tensor // self.config.kept_kv_heads)
        windows = heads.windows or (heads.modifier.window,)
        check_context(
            layout_text(layout), heads.context, copies, self._engine.first_page_size(device.platform), windows
        )
        whole = whole_experts(layout, config.experts)
        quantized = self._engine.quantized_dtype
        lanes = {} if whole or decode_mesh.tensor == 1 or quantized is not None else part_lanes(device.platform)
        layouts = leaf_layouts(weights, decode_mesh, tensor_dims(whole_experts=whole), lanes)
        if quantized is not None:
            layouts = quantized_layouts(layouts, quantized, quantized_dims)
        if layout == "training" and any(leaf.spec[0] for leaf in jax.tree.leaves(layouts.layers)):
            raise ConfigError(
                "layout training reads each layer where it is, and stages have some of the layers each (mesh "
                f"{dict(self.mesh.shape)}). Use auto, or {{tensor: n}}."
            )
        leaves = _leaves(weights, layouts, dtype)
        lazy = is_lazy(weights)
        casts = quantized is not None or any(leaf.dtype != dtype for leaf in jax.tree.leaves(weights))
        away = tuple(weight for weight in leaves if not weight.in_place)
        moves = layout != "training" and bool(away)
        copy = sum(weight.decode_bytes if moves else weight.training_bytes for weight in leaves)
        return DecodeModel(
            layout=layout,
            config=config,
            weights=weights,
            decode_mesh=decode_mesh,
            active_replicas=count_active(layout, decode_mesh.replicas),
            device=device,
            heads=heads,
            dtype=dtype,
            quantized_dtype=quantized,
            kv_dtype=kv_dtype,
            kept=kept_by_layer(
                config,
                heads,
                stored_kv_heads(device, heads, kv_dtype),
                state_spec(config, decode_mesh.tensor, dtype),
            ),
            whole_experts=whole,
            layouts=layouts,
            leaves=leaves,
            lazy=lazy,
            casts=casts,
            moves=moves,
            copied_bytes=copy if moves or lazy or casts else 0,
            gathered=away if layout == "training" else (),
        )

    def _check_exact(self, layout: Layout, decode_mesh: DecodeMesh) -> None:
        """Refuse what ``numerics: exact`` cannot do."""
        config, tensor = self.config, decode_mesh.tensor
        for name in ("kv_cache_dtype", "weight_dtype"):
            if getattr(self._engine, name) != "auto":
                raise ConfigError(
                    f"numerics is exact and {name} is {getattr(self._engine, name)}, of which the trainer knows "
                    f"nothing. Set {name} to auto, or numerics to fast."
                )
        if decode_mesh.context > 1:
            raise ConfigError("numerics is exact and context in layout sums attention by device. Leave out either.")
        split = {"num_heads": config.num_heads, "the vocabulary": self._weights.embed.shape[0]}
        for name, size in (split | _split(config, layout)).items():
            if blocks_of(size) % tensor:
                raise ConfigError(
                    f"numerics is exact and layout {{tensor: {tensor}}} splits {name} = {size}, whose sums are in "
                    f"{blocks_of(size)} blocks. Set tensor to a divisor of that, or numerics to fast."
                )


def _leaves(weights: DecoderWeights, layouts: LayoutTree, dtype: jnp.dtype) -> tuple[Weight, ...]:
    leaves = []
    every = jax.tree_util.tree_leaves_with_path(weights)
    for (path, leaf), layout in zip(every, jax.tree.leaves(layouts), strict=True):
        name, dims = path[-1].name, list(leaf.shape)
        if (dim := layout.tensor_dim) is not None:
            dims[dim] = -(-dims[dim] // layout.decode_mesh.tensor)
        size = math.prod(dims)
        if isinstance(layout, LeafLayout) and dim is not None:
            dims[dim] += -dims[dim] % layout.lanes
        block = tuple(leaf.shape) if leaf.sharding is None else leaf.sharding.shard_shape(tuple(leaf.shape))
        weight = Weight(
            name=name,
            layers=leaf.shape[0] if name in STACKED else 0,
            in_place=layout == layout.decode,
            decode_size=size,
            decode_bytes=_bytes(layout, tuple(dims), dtype),
            training_bytes=_bytes(layout, block, dtype),
        )
        leaves.append(weight)
    return tuple(leaves)


def _bytes(layout: LeafLayout | QuantizedLayout, dims: tuple[int, ...], dtype: jnp.dtype) -> int:
    return layout.bytes(dims) if isinstance(layout, QuantizedLayout) else math.prod(dims) * dtype.itemsize


def signature_of(config: LlamaConfig, weights: DecoderWeights) -> object:
    """Everything about a model that programs depend on: configuration, shapes, dtypes and shardings."""
    return config, shape_structs(weights)


def check_layout(config: LlamaConfig, layout: Layout, decode_mesh: DecodeMesh) -> None:
    """Refuse a layout that the model cannot be split in, with a `ConfigError` that names the numbers that work."""
    if config.experts is None and "expert" in layout:
        raise ConfigError(f"layout is {layout_text(layout)} and the model has no experts. Leave expert out.")
    if config.linear_attention is not None and decode_mesh.context > 1:
        raise ConfigError(
            f"layout {layout_text(layout)} has context, and the model has linear attention, whose state has no "
            "positions to split. Leave context out."
        )
    if len(config.heads_by_kind) > 1 and decode_mesh.context > 1:
        raise ConfigError(
            f"layout {layout_text(layout)} has context, and the model's layers have heads of two sizes, of which no "
            "positions are split. Leave context out."
        )
    for name, size in _split(config, layout).items():
        if size % decode_mesh.tensor:
            works = [tensor for tensor in decode_mesh.tensor_sizes if _fits(config, {"tensor": tensor})]
            raise ConfigError(
                f"layout {layout_text(layout)} splits {name} = {size}, which it does not divide. Set tensor to one of "
                f"{works}{', without expert' if 'expert' in layout else ''}."
            )


def _fits(config: LlamaConfig, layout: Layout) -> bool:
    return not any(size % (tensor_size(layout) or 1) for size in _split(config, layout).values())


def _with_experts(config: LlamaConfig, layout: Layout) -> list[Layout]:
    """The layout with each way to split experts, whole ones first, where it and the model leave both open."""
    if config.experts is None or isinstance(layout, str) or "expert" in layout or layout["tensor"] == 1:
        return [layout]
    ways: list[Layout] = [layout | {"expert": size} for size in (layout["tensor"], 1)]
    return ways if all(_fits(config, way) for way in ways) else [layout]


def _split(config: LlamaConfig, layout: Layout) -> dict[str, int]:
    tensor = tensor_size(layout) or 1
    heads = {
        "num_kv_heads" if kind == "full" else f"{kind}.num_kv_heads": of.num_kv_heads
        for kind, of in config.heads_by_kind.items()
        if not replicates_kv_heads(of, tensor)
    }
    if config.linear_attention is not None:
        heads |= {"linear_attention.key_heads": config.linear_attention.key_heads}
    mlp, experts = {"intermediate_dim": config.intermediate_dim}, config.experts
    if experts is None:
        return heads | mlp
    shared = {"experts.shared_intermediate_dim": experts.shared_intermediate_dim or tensor}
    heads = heads | shared | (mlp if config.mixes_mlps else {})
    whole, parts = {"experts.num_experts": experts.num_experts}, {"experts.intermediate_dim": config.expert_dim}
    return heads | (whole if whole_experts(layout, experts) else parts)
