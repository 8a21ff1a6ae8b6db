"""The Llama-family transformer over a paged KV cache, as one device of a replica runs it inside ``shard_map``."""

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from lockstep.engine.decoder.experts import answer_of_experts
from lockstep.engine.decoder.heads import device_heads
from lockstep.engine.decoder.ops import Exact, Sharded
from lockstep.engine.decoder.states import Recur
from lockstep.engine.schedule import Capacity, RoutedShape
from lockstep.models import (
    MLP_WEIGHTS,
    SPARSE_WEIGHTS,
    WEIGHT_AXES,
    DecoderWeights,
    LayerKind,
    LayerWeights,
    LlamaConfig,
    attention_of,
    block,
    distinct,
    layer_kinds,
    packed_experts,
    repeated_runs,
    rotary,
    rotary_angles,
)
from lockstep.models.attention import Heads
from lockstep.models.delta_rule import DeltaGates
from lockstep.models.layers import feed_forward, first_stream, gated_norm, kept, last_stream, layer
from lockstep.placement import DecodeMesh, LayoutTree, drop_layers, read, read_outer
from lockstep.placement.device import elementwise, product

LAYER: Final = frozenset(field.name for field in dataclasses.fields(LayerWeights))
EXPERTS: Final = tuple(name for name, axes in WEIGHT_AXES.items() if "expert" in axes[:-1])

type Write[Cache] = Callable[[Cache, Array, Array], Cache]
"""Takes the cache, a layer and K/V ``[sequence, query, *PagedKv.shape]``; returns the cache with them written."""
type Attend[Cache] = Callable[[Cache, Array, Array, Array | None], Array]
"""Takes the cache, a layer, queries ``[sequence, query, kv_head, group, head]`` and the sinks of the layer's heads
``[kv_head, group]``; returns attention's output."""
type After[Cache] = Callable[[Cache, Array, Array], Cache]
"""Takes the cache, a layer and the residual stream after it; returns the cache."""


@dataclasses.dataclass(frozen=True)
class Past[Cache]:
    """The functions by which a program writes and reads the past, in whatever form it has that.

    They count the layers with attention over all positions, and those with linear attention, by themselves.

    Args:
        recur: The recurrence of layers with linear attention; None where there are none.
        after: Called after each layer; None for nothing.
    """

    write: Write[Cache]
    attend: Attend[Cache]
    recur: Recur | None = None
    after: After[Cache] | None = None


class Sequences(NamedTuple):
    """The sequences that the queries of a program belong to."""

    start: Int[Array, " sequence"]
    """The position of the first query of each."""
    active: Bool[Array, " sequence"]
    """Whether it is there; for others no expert is read, and their results are arbitrary."""
    position: Int[Array, "sequence query"] | None = None
    """The positions of the queries; None where they are consecutive from ``start`` on."""


def routed_shape(config: LlamaConfig, sizes: Capacity) -> RoutedShape | None:
    """The form of a token's experts, as programs report them; None where they do not."""
    return of_experts(config) if sizes.routed_experts else None


def of_experts(config: LlamaConfig) -> RoutedShape | None:
    """The form of a token's experts; None for a model that has none."""
    if (of := config.experts) is None:
        return None
    return RoutedShape(layers=config.num_layers, choices=of.num_experts_per_tok, experts=of.num_experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """The static part of the model: its shapes, and the layouts of its weights.

    Args:
        layouts: The layouts of the weights that the programs are given; stacked ones are read layer by layer.
        pages: The number of pages per layer in a replica's pool.
        vocab_size: The number of token ids that may be sampled; the embedding may have more rows.
        routed: The form of the experts of tokens; None where they are not reported.
    """

    config: LlamaConfig
    decode_mesh: DecodeMesh
    layouts: LayoutTree
    pages: int
    vocab_size: int
    routed: RoutedShape | None = None

    @property
    def heads(self) -> Heads:
        """The attention heads of one device."""
        return device_heads(self.config, self.decode_mesh)

    @property
    def kv_layers(self) -> int:
        """The number of layers that keep K and V."""
        return self.config.num_layers - len(self.config.linear_layers)

    def read_outer(self, weights: DecoderWeights) -> DecoderWeights:
        """Return the weights with all but ``layers`` as this device needs them: embedding, norms and output layer."""
        return read_outer(self.layouts, weights)

    def embed(self, weights: DecoderWeights, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
        """Look up rows of the embedding, whose vocabulary is split over the devices of a replica."""
        table = weights.embed
        if self.decode_mesh.tensor == 1:
            x = table[tokens]
        else:
            local = tokens - jax.lax.axis_index(self.decode_mesh.tensor_axes) * table.shape[0]
            is_local = (local >= 0) & (local < table.shape[0])
            x = jnp.where(is_local[..., None], table[jnp.where(is_local, local, 0)], 0)
            x = jax.lax.psum(x, self.decode_mesh.tensor_axes)
        return first_stream(self._ops, self.config, weights, x)

    def logits(self, weights: DecoderWeights, x: Float[Array, "slot embed"]) -> Float[Array, "slot local_vocab"]:
        """Return float32 logits of this device's part of the vocabulary; -inf from ``vocab_size`` on."""
        x = last_stream(self._ops, self.config, weights, x)
        if isinstance(self._ops, Exact):
            head = weights.embed if weights.lm_head is None else weights.lm_head
            tied = weights.lm_head is None
            logits = product(x, head, columns=self._ops.blocks(head.shape[0 if tied else 1]), transposed=tied)
        elif weights.lm_head is None:
            logits = jnp.einsum("sd,vd->sv", x, weights.embed, preferred_element_type=jnp.float32)
        else:
            logits = jnp.einsum("sd,dv->sv", x, weights.lm_head, preferred_element_type=jnp.float32)
        cap = self.config.variant.logit_soft_cap
        if self.config.exact and cap is not None:
            logits = elementwise(lambda x: block.soft_cap(x, cap), logits)
        else:
            logits = self._ops.fix(block.soft_cap(logits, cap))
        if logits.shape[1] * self.decode_mesh.tensor == self.vocab_size:
            return logits
        first = jax.lax.axis_index(self.decode_mesh.tensor_axes) * logits.shape[1] if self.decode_mesh.tensor > 1 else 0
        return jnp.where(first + jnp.arange(logits.shape[1]) < self.vocab_size, logits, -jnp.inf)

    def layers[Cache](
        self,
        weights: LayerWeights,
        x: Float[Array, "sequence query embed"],
        cache: Cache,
        past: Past[Cache],
        sequences: Sequences,
        *,
        count: int | None = None,
        replayed: Int[Array, "sequence query layer choice"] | None = None,
    ) -> tuple[Float[Array, "sequence query embed"], Cache, Int32[Array, "sequence query word"] | None]:
        """Run all layers over consecutive positions of each sequence and write their K/V to the cache.

        Args:
            weights: The device's blocks of the stacked layers.
            x: The embedded tokens.
            cache: The past of all layers.
            count: The number of layers to run, from the first on; None for all.
            replayed: The experts to take (`lockstep.models.route`).

        Returns:
            The residual stream, the cache, and the experts of the tokens where they are reported.
        """
        angles = self._rope_angles(x, sequences)
        valid = jnp.repeat(sequences.active, x.shape[1])
        shape = self.routed
        routed = None if shape is None else jnp.full((shape.layers, valid.size * shape.choices), -1, shape.dtype)

        def run(kind: str, index: Array, carry: tuple[Array, Cache, Array | None]) -> tuple[Array, Cache, Array | None]:
            x, cache, routed = carry
            w, place, of_kind = self._layer(weights, index, kind), self._place(index, kind), self.of_kind(kind)

            def attend_and_write(q: Array, k: Array, v: Array) -> Array:
                nonlocal cache
                cache = past.write(cache, place, of_kind.heads.kept.join(k, v))
                return past.attend(cache, place, q, w.sinks)

            def recur_and_write(inputs: Array, taps: Array, gates: DeltaGates) -> Array:
                nonlocal cache
                assert past.recur is not None
                out, cache = past.recur(cache, place, inputs, taps, gates)
                return out

            def mlp(h: Array) -> tuple[Array, Array | None]:
                own = None if replayed is None else replayed[:, :, index].reshape(valid.size, -1)
                return self._mlp_of_layer(weights, w, index, valid, h, own)

            rotation = self._of_layer(angles, index, kind)
            mix = recur_and_write if kind == "linear" else attend_and_write
            x, experts = layer(of_kind._ops, of_kind.config, w, x, rotation, mix, mlp)
            if routed is not None and experts is not None:
                routed = routed.at[index].set(experts.reshape(-1).astype(routed.dtype))
            return x, cache if past.after is None else past.after(cache, index, x), routed

        x, cache, routed = self._in_runs(run, (x, cache, routed), count)
        return x, cache, None if routed is None else packed_experts(routed, valid.size).reshape(*x.shape[:2], -1)

    def _in_runs[Carry](self, run: Callable[[str, Array, Carry], Carry], carry: Carry, count: int | None) -> Carry:
        """Apply a function to each layer: a loop over each run of layers of one kind of attention, in a loop over units
        that repeat.
        """
        first = 0
        for unit, repeats in repeated_runs(self._kinds[:count]):
            length = sum(layers for _, layers in unit)

            def of_unit(number: Any, carry: Carry, unit: Any = unit, begin: int = first, length: int = length) -> Carry:
                begin = begin + number * length
                for kind, layers in unit:
                    carry = jax.lax.fori_loop(begin, begin + layers, functools.partial(run, kind), carry)
                    begin = begin + layers
                return carry

            carry = of_unit(0, carry) if repeats == 1 else jax.lax.fori_loop(0, repeats, of_unit, carry)
            first += repeats * length
        return carry

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The attention of each layer."""
        return self.config.attention_kinds

    def of_kind(self, kind: str) -> "Transformer":
        """The transformer as layers of a kind of attention see it, with their heads."""
        config = self.config.of_attention(kind)
        return self if config is self.config else dataclasses.replace(self, config=config)

    def fill_cache[Cache](
        self,
        weights: LayerWeights,
        x: Float[Array, "sequence query embed"],
        cache: Cache,
        past: Past[Cache],
        sequences: Sequences,
    ) -> tuple[Cache, Int32[Array, "sequence query word"] | None]:
        """Run `layers`, with the same arguments, for cache and experts: of the last layer it computes only K/V, unless
        it has a state.
        """
        last = self.config.num_layers - 1
        kind = self._kinds[last]
        stateful = kind == "linear"
        x, cache, routed = self.layers(weights, x, cache, past, sequences, count=None if stateful else last)
        if stateful:
            return cache, routed
        index = jnp.int32(last)
        w, of_kind = self._layer(weights, index, kind), self.of_kind(kind)
        h = gated_norm(self._ops, x, w.attn_norm, w.attn_norm_down, w.attn_norm_up)
        rotation = self._of_layer(self._rope_angles(x, sequences), index, kind)
        k, v = kept(of_kind._ops, of_kind.config, w, h, rotation)
        return past.write(cache, self._place(index, kind), of_kind.heads.kept.join(k, v)), routed

    def _layer(self, weights: LayerWeights, index: Array, kind: str) -> LayerWeights:
        """Return one layer's weights as this device needs them, without its MLP where layers differ in it."""
        names = LAYER - {*MLP_WEIGHTS, *SPARSE_WEIGHTS} if self.config.mixes_mlps else LAYER
        if len({*self._kinds}) == 1:
            return self._at(weights, index, names)
        place = _place_among(np.array(self._kinds) == kind, index)
        own = {name for name in names if attention_of(name) == kind}
        attention = self._at(weights, place, own)
        common = {name for name in names if attention_of(name) is None}
        return dataclasses.replace(self._at(weights, index, common), **{name: getattr(attention, name) for name in own})

    def _place(self, index: Array, kind: str) -> Array:
        """Return the place of a layer among those that keep rows in pages, or among those that have a state."""
        if self.config.linear_attention is None:
            return index
        return _place_among((np.array(self._kinds) == "linear") == (kind == "linear"), index)

    def _at(self, weights: LayerWeights, index: Array, names: Set[str]) -> LayerWeights:
        """Return some weights at a place of their stack. Indexed inside a loop, blocks are read in place.

        Those of experts stay stacked (`mixture`), unless each step gathers them.
        """
        stacked = names & {*EXPERTS} if self._stacked_experts else set()
        left_out = dict.fromkeys(LAYER - names | stacked)
        layouts, indexed = (dataclasses.replace(tree, **left_out) for tree in (self.layouts.layers, weights))
        stored = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), indexed)
        layer: LayerWeights = read(drop_layers(layouts), stored)
        return dataclasses.replace(layer, **{name: getattr(weights, name) for name in stacked})

    @property
    def _stacked_experts(self) -> bool:
        layouts = [layout for name in EXPERTS if (layout := getattr(self.layouts.layers, name)) is not None]
        return bool(layouts) and all(layout == layout.decode for layout in layouts)

    def _rope_angles(self, x: Array, sequences: Sequences) -> dict[str, block.Rotary]:
        """Return the angles of all kinds of layers whose heads are those of a kind of attention, by that."""
        start, _, position = sequences
        positions = start[:, None] + jnp.arange(x.shape[1]) if position is None else position
        apply = elementwise if self.config.exact else (lambda turn, x: turn(x))
        angles = {}
        for kind, config in self.config.heads_by_kind.items():
            kinds, _ = self._rotations(kind)
            angles[kind] = rotary(config, rotary_angles(self.config, kinds, positions), apply)
        return angles

    def _rotations(self, kind: str) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
        """Return the distinct kinds of layers with the heads of a kind of attention, but for their windows, and which
        each layer has; of a layer with other heads any.
        """
        of_layers = [dataclasses.replace(of_layer, window=None) for of_layer in layer_kinds(self.config)]
        first = next(of_layer for of_layer in of_layers if of_layer.attention == kind)
        return distinct(of_layer if of_layer.attention == kind else first for of_layer in of_layers)

    def _of_layer(self, angles: dict[str, block.Rotary], index: Array, kind: str) -> block.Rotary:
        """Return the angles of one layer."""
        kind = kind if kind in angles else "full"
        kinds, indices = self._rotations(kind)
        if len(kinds) == 1:
            return angles[kind]
        number = jnp.asarray(indices)[index]
        return jax.tree.map(lambda angle: jax.lax.dynamic_index_in_dim(angle, number, keepdims=False), angles[kind])

    def _mlp_of_layer(
        self, weights: LayerWeights, w: LayerWeights, index: Array, valid: Array, h: Array, replayed: Array | None
    ) -> tuple[Array, Array | None]:
        """Return `_mlp` of a layer; where some have an MLP and some experts, by the kind that it has."""
        if not self.config.mixes_mlps:
            return self._mlp(w, h, index, valid, replayed)
        assert self.config.experts is not None
        dense, places = self.config.experts.places(self.config.num_layers)
        place = jnp.asarray(places)[index]

        def branch(names: Set[str]) -> Callable[[Array], tuple[Array, Array | None]]:
            return lambda h: self._mlp(self._at(weights, place, names), h, place, valid, replayed)

        result: tuple[Array, Array | None]
        result = jax.lax.cond(jnp.asarray(dense)[index], branch({*MLP_WEIGHTS}), branch(SPARSE_WEIGHTS), h)
        return result

    def _mlp(
        self, w: LayerWeights, h: Array, index: Array, valid: Array, replayed: Array | None
    ) -> tuple[Array, Array | None]:
        """Return the answer of the MLP or of experts, and the numbers of those that each token is given to where they
        are reported; -1 for a layer without experts.

        Every device of a replica has all tokens, and its share of the experts, or of the width of each.
        """

        def experts(h: Array, of_router: Array | None) -> tuple[Array, Array]:
            answers, routing = answer_of_experts(
                self.config, self.decode_mesh, w, h.reshape(-1, h.shape[-1]),
                valid=valid, layer=index if self._stacked_experts else None, replayed=replayed,
                of_router=None if of_router is None else of_router.reshape(-1, h.shape[-1]),
            )  # fmt: skip
            return answers.reshape(h.shape), routing.experts

        answer, chosen = feed_forward(self._ops, self.config, w, h, experts)
        if self.routed is None:
            return answer, None
        if chosen is None:
            chosen = jnp.full((h.size // h.shape[-1], self.routed.choices), -1, jnp.int32)
        return answer, chosen

    @functools.cached_property
    def _ops(self) -> Sharded:
        return (Exact if self.config.exact else Sharded)(self.config, self.decode_mesh)


def _place_among(chosen: np.ndarray, index: Array) -> Array:
    """Return the place of a layer among those that are chosen ``[layer]``."""
    return jnp.asarray(np.cumsum(chosen) - 1)[index]
