"""Bytes per device that sampling takes beside the model as it lies: predicted from shapes, or read off the compiler."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.attention import CONTEXT_CHUNK, has_kernel, stored_kv_heads, tpu_generation
from lockstep.device import block_bytes
from lockstep.engine.decoder.build import Programs
from lockstep.engine.decoder.prompt_logprobs import PROMPT_LOGPROBS_CHUNK
from lockstep.engine.decoder.transformer import device_heads
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement.decode_mesh import DecodeMesh
from lockstep.placement.lazy_weight import is_lazy
from lockstep.placement.leaf_layout import LeafLayout, leaf_layouts
from lockstep.schedule import Capacity

OUTER = ("embed", "lm_head", "final_norm", "embed_norm")
"""Weights that are not stacked."""

_CHUNK = 512
"""Positions that decode attends at a time, at most: a longer context is padded to a multiple."""

_VOCABULARIES = 7
"""Arrays of a number per slot and token id that a decode step on a TPU holds at its worst moment, when top-p counts
equal scores: read off the compiler at 256 sequences. Of smaller batches some are in vector memory."""

_IN_VECTOR_MEMORY = {"v6e": 40 << 20}
"""Bytes of those that the compiler keeps in vector memory however many there are; it was found to keep 51 to 81 MiB."""

_CODE = 10 << 20
"""Of the hungriest program itself on a TPU: 7 to 9 MiB in all that were compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes per device beside the model as the trainer holds it.

    Args:
        weights: of the decode copy; 0 where the weights are read as they lie.
        pool: of the KV cache.
        reshard: what moving the weights takes beside their copy, before there is a pool.
        temporaries: what the hungriest of prefill, score and decode takes beside weights and pool.
    """

    weights: int
    pool: int
    reshard: int
    temporaries: int

    @property
    def total(self) -> int:
        """At the moment of worst use."""
        return self.weights + max(self.reshard, self.pool + self.temporaries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """A model as one layout has it: everything that bytes and seconds are predicted from.

    Args:
        config: of the model.
        weights: arrays or shape structs with shardings.
        decode_mesh: the decode mesh.
        dtype: to decode in.
        gather: whether the layout is not ``training``: weights are moved into the decode mesh, if they are not there.
        kv_dtype: of the KV cache; None: ``dtype``.
    """

    config: LlamaConfig
    weights: DecoderWeights
    decode_mesh: DecodeMesh
    dtype: jnp.dtype
    gather: bool
    kv_dtype: jnp.dtype | None = None

    @functools.cached_property
    def leaves(self) -> list[tuple[str, Any, LeafLayout]]:
        """Name, array and layout of each weight."""
        layouts = jax.tree.leaves(leaf_layouts(self.weights, self.decode_mesh))
        found = jax.tree_util.tree_leaves_with_path(self.weights)
        return [(path[-1].name, leaf, layout) for (path, leaf), layout in zip(found, layouts, strict=True)]

    @functools.cached_property
    def moves(self) -> bool:
        """Whether the weights are moved before decoding."""
        return self.gather and any(layout != layout.decode for _, _, layout in self.leaves)

    @functools.cached_property
    def copied(self) -> int:
        """Bytes of the copy of the weights that decoding needs, if any."""
        if self.moves:
            return sum(self.decode_bytes(leaf, layout) for _, leaf, layout in self.leaves)
        if is_lazy(self.weights) or any(leaf.dtype != self.dtype for _, leaf, _ in self.leaves):
            return sum(self.cast_bytes(leaf) for _, leaf, _ in self.leaves)
        return 0

    def decode_bytes(self, leaf: Any, layout: LeafLayout) -> int:
        """Of one weight on a device, in the decode layout and dtype."""
        dims = list(leaf.shape)
        if layout.tensor_dim is not None:
            dims[layout.tensor_dim] = -(-dims[layout.tensor_dim] // self.decode_mesh.tensor)
        return math.prod(dims) * self.dtype.itemsize

    def cast_bytes(self, leaf: Any) -> int:
        """Of one weight on a device, where the trainer has it, in the decode dtype."""
        return block_bytes(leaf) * self.dtype.itemsize // leaf.dtype.itemsize

    @functools.cached_property
    def gathered(self) -> dict[str, int]:
        """Bytes of the weights that ``training`` gathers anew while it decodes; of stacked ones, of all layers."""
        if self.gather:
            return {}
        return {name: self.decode_bytes(leaf, at) for name, leaf, at in self.leaves if at != at.decode}

    @property
    def cache_dtype(self) -> jnp.dtype:
        """Of the KV cache."""
        return self.kv_dtype or self.dtype

    @property
    def kv_bytes(self) -> int:
        """Of K and V at one position, all layers, on a device; in 8 bits with their scales."""
        config = self.config
        heads = device_heads(config, self.decode_mesh)
        held = stored_kv_heads(self.decode_mesh.mesh.devices.flat[0], heads, self.cache_dtype)
        return config.num_layers * 2 * held.kv_heads * held.head_size * self.cache_dtype.itemsize

    @functools.cached_property
    def reshard(self) -> int:
        """Bytes that moving the weights takes beside their copy."""
        made = is_lazy(self.weights)
        if not self.moves or not (made or any(leaf.dtype != self.dtype for _, leaf, _ in self.leaves)):
            return 0
        if self._tpu and not made and self.dtype == jnp.bfloat16:
            return self._on_its_way
        # The compiler casts all layers before the loop that moves them; `placement.move.cast` keeps it inside.
        cast = sum(self.cast_bytes(leaf) for _, leaf, _ in self.leaves)
        return cast + (self._layer_bytes if self._tpu else 0)

    def footprint(self, sizes: Capacity) -> Footprint:
        """What the programs for ``sizes`` take, predicted; the compiler has the last word (`measured`)."""
        return Footprint(
            weights=self.copied,
            pool=sizes.pages * sizes.page_size * self.kv_bytes,
            reshard=self.reshard,
            temporaries=max(self.temporaries(sizes).values()),
        )

    def temporaries(self, sizes: Capacity) -> dict[str, int]:
        """What each program takes beside weights and pool."""
        code = _CODE if self._tpu else 0
        return {
            "prefill": self._prefill(sizes) + code,
            "prompt_logprobs": self._score(sizes) + code if sizes.prompt_logprobs else 0,
            "decode": self._decode(sizes) + self._rewritten + code,
        }

    @functools.cached_property
    def _kernel(self) -> bool:
        """Whether attention reads K/V where they lie."""
        return has_kernel(self.decode_mesh.mesh.devices.flat[0], self.config.head_size)

    @functools.cached_property
    def _tpu(self) -> bool:
        """Whether the TPU compiler makes the programs."""
        return self.decode_mesh.mesh.devices.flat[0].platform == "tpu"

    @functools.cached_property
    def _rewritten(self) -> int:
        """Decode's stacked projections, which the TPU compiler keeps once more in the order that it wants; without the
        attention kernel twice more. With one kv head to a device K and V are in that order already.
        """
        if not self._tpu or self.gathered:
            return 0
        one = self._kernel and device_heads(self.config, self.decode_mesh).kv_heads == 1
        names = ("q",) if one else ("q", "k", "v")
        copies = 1 if self._kernel else 2
        return copies * sum(self.decode_bytes(leaf, at) for name, leaf, at in self.leaves if name in names)

    def _decode(self, sizes: Capacity) -> int:
        config, tensor = self.config, self.decode_mesh.tensor
        outer = sum(size for name, size in self.gathered.items() if name in OUTER)
        vocab = -(-self.weights.embed.shape[0] // tensor)
        context = sizes.slots * (0 if self._kernel else self._context_bytes(sizes))
        heads = config.num_heads // min(tensor, config.num_kv_heads)
        chunk = min(_CHUNK, sizes.pages_per_sequence * sizes.page_size)
        scores = 0 if self._kernel else 3 * heads * chunk * 4 + self._widened(chunk)
        if self._tpu and not self._kernel:  # K and V of a chunk of a layer, in use and on their way
            scores += 2 * CONTEXT_CHUNK * self.kv_bytes // config.num_layers
        # On CPU logits, scores and noise in float32; and a count per token where there are penalties.
        sampling = sizes.slots * ((_VOCABULARIES if self._tpu else 4) + sizes.penalties) * vocab * 4
        if self._tpu:
            kind = tpu_generation(self.decode_mesh.mesh.devices.flat[0].device_kind)
            sampling = max(0, sampling - _IN_VECTOR_MEMORY.get(kind, 0))
        of_slots = sizes.slots * (scores + 8 * sizes.steps + self._activations)
        return outer + self._one_layer + context + sampling + of_slots

    def _score(self, sizes: Capacity) -> int:
        if not sizes.prompt_logprobs:
            return 0
        outer = sum(size for name, size in self.gathered.items() if name in OUTER)
        chunk = min(PROMPT_LOGPROBS_CHUNK, sizes.prefill_rows * sizes.page_size)
        logits = 3 * chunk * -(-self.weights.embed.shape[0] // self.decode_mesh.tensor) * 4
        return self._prefill(sizes) + outer + logits

    def _prefill(self, sizes: Capacity) -> int:
        config, tensor = self.config, self.decode_mesh.tensor
        length = sizes.pages_per_sequence * sizes.page_size
        heads = config.num_heads // min(tensor, config.num_kv_heads)
        # A kernel reads K/V where they lie and keeps scores in the core.
        context = 0 if self._kernel else 2 * length * self.kv_bytes // config.num_layers + self._widened(length)
        scores = 0 if self._kernel else 3 * heads * sizes.page_size * length * 4
        outer = max((self.gathered.get(name, 0) for name in ("embed", "lm_head")), default=0)
        one_layer = context + scores + sizes.page_size * self._activations
        return max(outer, self._one_layer) + sizes.prefill_rows * one_layer

    def _widened(self, positions: int) -> int:
        """K and V of a layer at so many positions in the dtype to compute in, where they are kept in another."""
        if self.cache_dtype == self.dtype:
            return 0
        heads = device_heads(self.config, self.decode_mesh)
        return 2 * positions * heads.kv_heads * heads.head_size * self.dtype.itemsize

    @functools.cached_property
    def _on_its_way(self) -> int:
        """While weights move, read off the TPU compiler for Llama-3.1-8B, at most.

        Without a tensor group one stacked weight of a layer after the other is gathered where it belongs, and vectors
        beside it; else parts of several layers wait for their turn.
        """
        if self.decode_mesh.tensor > 1:
            return 34 * self._layer_bytes // 10
        largest = max(self.decode_bytes(leaf, at) for name, leaf, at in self.leaves if name not in OUTER)
        return 102 * largest // 100 // self.config.num_layers

    @functools.cached_property
    def _layer_bytes(self) -> int:
        """Of one layer's weights in the decode layout."""
        stacked = (self.decode_bytes(leaf, at) for name, leaf, at in self.leaves if name not in OUTER)
        return sum(stacked) // self.config.num_layers

    @functools.cached_property
    def _one_layer(self) -> int:
        """Two layers of what ``training`` gathers: one in use, the next on its way."""
        stacked = sum(size for name, size in self.gathered.items() if name not in OUTER)
        return 2 * stacked // self.config.num_layers

    @functools.cached_property
    def _activations(self) -> int:
        """Of one token."""
        config = self.config
        return 4 * (6 * config.hidden_dim + 3 * -(-config.intermediate_dim // self.decode_mesh.tensor))

    def _context_bytes(self, sizes: Capacity) -> int:
        """Of the context of one slot as decode lays it out once per launch, in whole chunks where it is long.

        In float32 the TPU compiler holds it twice (read off it for heads of 256 on a v5p).
        """
        length = sizes.pages_per_sequence * sizes.page_size
        times = 2 if self._tpu and self.cache_dtype.itemsize == 4 else 1
        return times * self.kv_bytes * (length if length <= _CHUNK else -(-length // _CHUNK) * _CHUNK)


def measured(programs: Programs) -> Footprint:
    """What compiled programs take, by the compiler's own memory analysis."""
    reshard = weights = 0
    if programs.reshard is not None:
        memory = programs.reshard.memory()
        weights, reshard = int(memory.output_size_in_bytes), int(memory.temp_size_in_bytes)
    pool = int(programs.new_cache.memory().output_size_in_bytes)
    temporaries = []
    for program in (programs.prefill, programs.copy_pages, programs.prompt_logprobs, programs.decode):
        if program is None:
            continue
        memory = program.memory()
        # Arguments hold the weights, the pool and the plan; the plan is a few KiB and its device copy is not counted.
        temporaries.append(
            int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
            + int(memory.generated_code_size_in_bytes)
        )
    return Footprint(weights=weights, pool=pool, reshard=reshard, temporaries=max(temporaries))
