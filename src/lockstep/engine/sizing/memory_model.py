"""Bytes per device that sampling takes beside the trainer's model: predicted from shapes, or read off the compiler."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lockstep.engine.decode_model import DecodeModel
from lockstep.engine.decoder.build import Programs
from lockstep.engine.decoder.prefill import PROMPT_LOGPROBS_CHUNK
from lockstep.engine.decoder.transformer import routed_shape
from lockstep.engine.decoder.verify import logits_at_once
from lockstep.engine.schedule import Capacity
from lockstep.engine.sizing.demand import Demand
from lockstep.models.attention import CONTEXT_CHUNK, has_kernel, stored_kv_heads, tpu_generation

_CHUNK = 512
"""Positions that decode attends at a time, at most: a longer context is padded to a multiple."""

_VOCABULARIES = 3
"""Arrays of a number per slot and token id that a decode step on a TPU has at its worst moment: read off the compiler
at 128 to 1,024 sequences, which had 1 to 2.7 of them."""

_FILTERED_VOCABULARIES = 7
"""The same with top-k, top-p and min-p, when top-p counts equal scores: read off the compiler at 256 sequences. With
smaller batches some are in vector memory."""

_MORE_OF_FEW = 64 << 20
"""Bytes that up to two more such arrays take without filters; of 32 and 64 sequences there were up to 4.6 in all."""

_IN_VECTOR_MEMORY = {"v6e": 40 << 20}
"""Bytes of those, and of what a prefill computes, that the compiler keeps in vector memory however many there are; it
was found to keep 43 MiB of those at 512 sequences, 95 at 128 and 143 at 256."""

_CODE = 10 << 20
"""Bytes of a program itself on a TPU: 7 to 9 MiB in all that were compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes per device beside the model as the trainer has it."""

    weights: int  # bytes of the decode copy of the weights; 0 where the trainer's are read in place
    pool: int  # bytes of the KV cache
    reshard: int  # what moving the weights takes beside their copy, before there is a pool
    temporaries: int  # what the largest of prefill, prompt log-probabilities and decode takes beside weights and pool

    @property
    def total(self) -> int:
        """Bytes in use at the moment when most are."""
        return self.weights + max(self.reshard, self.pool + self.temporaries)


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """Predicts what the programs of a model in one layout take; the compiler has the last word (`measured`)."""

    model: DecodeModel

    def footprint(self, sizes: Capacity) -> Footprint:
        """Bytes per device with a capacity."""
        return Footprint(
            weights=self.model.copied_bytes,
            pool=sizes.pages * sizes.page_size * self.model.kv_bytes + sizes.slots * self.model.sequence_bytes,
            reshard=self.reshard,
            temporaries=max(self.temporaries(sizes).values()),
        )

    def temporaries(self, sizes: Capacity) -> dict[str, int]:
        """Bytes per device that each program takes beside weights and pool, by its name."""
        # Without a TPU the products of 8 bits widen a layer's weights in memory.
        code = _CODE if self._tpu else self._layer_bytes * (self.model.quantized_dtype is not None)
        rows = self._rows(sizes)
        prefill = self._prefill(sizes) + self._rewritten_in_prefill if self._kernel else rows
        page_tokens = sizes.prefill_rows * sizes.page_size
        return {
            "prefill": prefill + self._routed(sizes, page_tokens, page_tokens) + code,
            "prompt_logprobs": rows + self._prompt_logprobs(sizes) + code if sizes.prompt_logprobs else 0,
            "decode": self._decode(sizes) + self._rewritten + code,
            "verify": self._verify(sizes) + self._rewritten + code if sizes.verify_widths else 0,
        }

    @functools.cached_property
    def reshard(self) -> int:
        """Bytes per device that moving the weights takes beside their copy."""
        model = self.model
        if not model.moves or not (model.lazy or model.casts):
            return 0
        if self._tpu and not model.lazy and model.dtype == jnp.bfloat16:
            return self._moving
        # The compiler casts all layers before the loop that moves them; `placement.reshard.cast` keeps it inside.
        cast = sum(weight.training_bytes for weight in model.leaves)
        return cast + (self._layer_bytes if self._tpu else 0)

    @functools.cached_property
    def _kernel(self) -> bool:
        """Whether a kernel does the attention: it reads K/V from the pool in place and keeps scores in the core."""
        return has_kernel(self.model.device, self.model.heads)

    @functools.cached_property
    def _tpu(self) -> bool:
        """Whether the TPU compiler makes the programs."""
        return self.model.device.platform == "tpu"

    @functools.cached_property
    def _tpu7x(self) -> bool:
        return tpu_generation(self.model.device.device_kind) == "tpu7x"

    def _prefill(self, sizes: Capacity) -> int:
        """Bytes where a kernel attends: of a layer the MLP's three arrays, and three as wide as the residual stream.

        An upper bound, read off the TPU compiler, which keeps some or all of them in vector memory.
        """
        model, config = self.model, self.model.config
        tokens = sizes.prefill_rows * sizes.page_size * model.dtype.itemsize
        mlp = -(-config.mlp_activations // model.decode_mesh.tensor)
        activations = tokens * (mlp + 3 * config.hidden_dim)
        activations += sizes.prefill_rows * sizes.page_size * self._exact_answers
        activations *= 2 if self._tpu7x else 1  # nearly twice as much, read off its compiler
        if (
            model.heads.context > 1
        ):  # what is exchanged, float32 in tiles of 8 heads: 12 to 16.5 arrays were read off it
            head = stored_kv_heads(model.device, model.heads, model.kv_dtype).head_size
            activations += 18 * 4 * sizes.prefill_rows * sizes.page_size * -(-self._heads // 8) * 8 * head
        activations -= _IN_VECTOR_MEMORY.get(tpu_generation(model.device.device_kind), 0)
        return self._gathered_at_once + max(activations, tokens * config.hidden_dim)

    def _rows(self, sizes: Capacity) -> int:
        """Bytes of all rows of a prefill or of prompt log-probabilities, at most."""
        length = sizes.pages_per_sequence * sizes.page_size
        context = 0 if self._kernel else 2 * length * self._layer_kv_bytes + self._widened(length)
        scores = 0 if self._kernel else 3 * self._heads * sizes.page_size * length * 4
        one_layer = context + scores + sizes.page_size * self._activations
        return self._gathered_at_once + sizes.prefill_rows * one_layer

    def _prompt_logprobs(self, sizes: Capacity) -> int:
        """Bytes beside those of a prefill."""
        chunk = min(PROMPT_LOGPROBS_CHUNK, sizes.prefill_rows * sizes.page_size)
        return self._gathered_outer + 3 * chunk * self._vocab * 4

    def _decode(self, sizes: Capacity) -> int:
        context = sizes.slots * (0 if self._kernel else self._context_bytes(sizes))
        chunk = min(_CHUNK, sizes.pages_per_sequence * sizes.page_size)
        scores = 0 if self._kernel else 3 * self._heads * chunk * 4 + self._widened(chunk)
        if self._tpu and not self._kernel:  # K and V of a chunk of a layer, in use and being read
            scores += 2 * CONTEXT_CHUNK * self._layer_kv_bytes
        # The states of a layer before a step, and after it.
        states = 2 * max(layer.sequence_bytes(self.model.kv_dtype) for layer in self.model.kept)
        of_slots = sizes.slots * (scores + 8 * sizes.steps + self._activations + states)
        routed = self._routed(sizes, sizes.slots, sizes.slots * sizes.steps)
        return self._gathered_outer + self._gathered_layers + context + self._sampling(sizes) + of_slots + routed

    def _routed(self, sizes: Capacity, at_once: int, tokens: int) -> int:
        """Bytes of the experts of tokens: those of a step in all layers, and the results of all replicas, twice."""
        shape = routed_shape(self.model.config, sizes)
        if shape is None:
            return 0
        step = at_once * shape.layers * shape.choices * (4 + 2 * shape.dtype.itemsize)
        return step + 2 * 4 * shape.words * tokens * (1 + sizes.replicas)

    def _sampling(self, sizes: Capacity) -> int:
        """Bytes of logits, scores, noise and what filters compute of them, in float32."""
        logits = sizes.slots * self._vocab * 4
        counts = logits * sizes.penalties
        if not self._tpu:
            return 4 * logits + counts
        if sizes.filters:
            # A device of a tensor group has the whole scores of the slots that it filters; a TPU7x has one more anyway.
            total = (_FILTERED_VOCABULARIES + (self.model.decode_mesh.tensor > 1 or self._tpu7x)) * logits
        else:
            total = _VOCABULARIES * logits + min(2 * logits, _MORE_OF_FEW)
        return max(0, total + counts - _IN_VECTOR_MEMORY.get(tpu_generation(self.model.device.device_kind), 0))

    def _verify(self, sizes: Capacity) -> int:
        """Bytes of the widest step that verifies drafts: those of a decode step, and of the positions of each slot."""
        width = sizes.verify_widths[-1]
        chunk = min(_CHUNK, sizes.pages_per_sequence * sizes.page_size)
        scores = 0 if self._kernel else 3 * self._heads * chunk * 4
        logits = 3 * logits_at_once(sizes.slots, width) * self._vocab * 4
        results = 4 * (4 + 2 * sizes.top_logprobs) * sizes.draft_tokens
        routed = self._routed(sizes, sizes.slots * width, sizes.slots * sizes.draft_tokens)
        return (
            self._decode(sizes) + routed + sizes.slots * (width * (scores + self._activations) + logits + 2 * results)
        )

    @functools.cached_property
    def _rewritten(self) -> int:
        """Decode's stacked projections, which the TPU compiler keeps once more in the order that it wants; without the
        attention kernel twice more. With one kv head to a device K and V are in that order already.
        """
        if not self._tpu or self.model.gathered:
            return 0
        names: tuple[str, ...] = ("q", "gated_q", "linear_qkvz", "linear_q", "linear_k", "linear_v", "linear_z")
        names += () if self._kernel and self.model.heads.kv_heads == 1 else ("k", "v", "wide_q", "wide_k", "wide_v")
        copies = 1 if self._kernel else 2
        return copies * sum(weight.decode_bytes for weight in self.model.leaves if weight.name in names)

    @property
    def _rewritten_in_prefill(self) -> int:
        """An upper bound: of weights in 8 bits the compiler was seen to keep k and v once more there too."""
        return 0 if self.model.quantized_dtype is None else self._rewritten

    @functools.cached_property
    def _moving(self) -> int:
        """Bytes while weights move, read off the TPU compiler for Llama-3.1-8B, at most.

        Without a tensor group one stacked weight of a layer after the other is gathered where it belongs, and vectors
        beside it; else, and on TPU7x, parts of several layers wait for their turn.
        """
        if self.model.decode_mesh.tensor > 1 or self._tpu7x:
            return self._stages * 34 * self._layer_bytes // 10
        largest = max(weight.decode_size // weight.layers for weight in self.model.leaves if weight.layers)
        return self._stages * 102 * largest * self.model.dtype.itemsize // 100

    @property
    def _stages(self) -> int:
        """The number of stages that layers are split over, of each of which a layer is moved at a time."""
        layouts = jax.tree.leaves(self.model.layouts.layers)
        return max(math.prod(layout.decode_mesh.mesh.shape[axis] for axis in layout.spec[0]) for layout in layouts)

    @functools.cached_property
    def _layer_bytes(self) -> int:
        """Bytes of one layer's weights in the decode layout and compute dtype; 8 bits were seen to take no less."""
        layer = sum(weight.decode_size // weight.layers for weight in self.model.leaves if weight.layers)
        return layer * self.model.dtype.itemsize

    @functools.cached_property
    def _gathered_layers(self) -> int:
        """Two layers of what ``training`` gathers: one in use, the next being gathered."""
        return 2 * sum(weight.decode_bytes // weight.layers for weight in self.model.gathered if weight.layers)

    @functools.cached_property
    def _gathered_at_once(self) -> int:
        """The most that ``training`` gathers at a time where there are no logits."""
        outer = [leaf.decode_bytes for leaf in self.model.gathered if leaf.name in ("embed", "lm_head")]
        return max(*outer, self._gathered_layers) if outer else self._gathered_layers

    @functools.cached_property
    def _gathered_outer(self) -> int:
        """Bytes that ``training`` gathers of the weights that are not stacked."""
        return sum(weight.decode_bytes for weight in self.model.gathered if not weight.layers)

    @functools.cached_property
    def _activations(self) -> int:
        """Bytes of the activations of one token; queries for a latent, scaled too, and results are as wide as it."""
        config, heads = self.model.config, self.model.heads
        mlp = -(-config.mlp_activations // self.model.decode_mesh.tensor)
        latent = 0 if heads.value_size is None else 3 * self._heads * heads.head_size
        return 4 * (6 * config.hidden_dim + mlp + latent) + self._exact_answers

    @functools.cached_property
    def _exact_answers(self) -> int:
        """Bytes of a token in which exact numerics add what experts answer, float32: gathered from all devices that
        have a part of each; four arrays where they have whole ones (read off XLA for CPU).
        """
        config = self.model.config
        if not config.exact or config.experts is None:
            return 0
        arrays = 4 if self.model.whole_experts else max(4, self.model.decode_mesh.tensor)
        return 4 * arrays * config.experts.num_experts_per_tok * config.hidden_dim

    @functools.cached_property
    def _heads(self) -> int:
        """Query heads that one device attends with."""
        return self.model.heads.kv_heads * self.model.heads.at_own_positions.group

    @functools.cached_property
    def _vocab(self) -> int:
        """Token ids of one device."""
        return -(-self.model.weights.embed.shape[0] // self.model.decode_mesh.tensor)

    @property
    def _layer_kv_bytes(self) -> int:
        """Bytes of a position in a layer that keeps most."""
        most = max(layer.position_bytes(self.model.kv_dtype) for layer in self.model.kept)
        return most // self.model.heads.context

    def _widened(self, positions: int) -> int:
        """Bytes of K and V of a layer at so many positions in the compute dtype, where they are kept in another."""
        if self.model.kv_dtype == self.model.dtype:
            return 0
        return positions * max(layer.position_bytes(self.model.dtype) for layer in self.model.kept)

    def _context_bytes(self, sizes: Capacity) -> int:
        """Bytes of the context of one slot as decode gathers it once per launch, in whole chunks where it is long.

        In float32 the TPU compiler has it twice (read off it for heads of 256 on a v5p), a latent up to four times.
        """
        length, latent = sizes.pages_per_sequence * sizes.page_size, self.model.heads.value_size is not None
        times = 1 if not self._tpu else 4 if latent else 2 if self.model.kv_dtype.itemsize == 4 else 1
        return times * self.model.kv_bytes * (length if length <= _CHUNK else -(-length // _CHUNK) * _CHUNK)


def measured(programs: Programs) -> Footprint:
    """Bytes of compiled programs, by the compiler's own memory analysis."""
    reshard = weights = 0
    if programs.reshard is not None:
        memory = programs.reshard.memory()
        weights, reshard = int(memory.output_size_in_bytes), int(memory.temp_size_in_bytes)
    pool = int(programs.new_cache.memory().output_size_in_bytes)
    temporaries = []
    launched = (programs.prefill, programs.copy_pages, programs.prompt_logprobs, programs.decode)
    for program in (*launched, *programs.verify.values()):
        if program is None:
            continue
        memory = program.memory()
        # Arguments are the weights, the pool and the batch; the batch is a few KiB and its device copy is not counted.
        temporaries.append(
            int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
            + int(memory.generated_code_size_in_bytes)
        )
    return Footprint(weights=weights, pool=pool, reshard=reshard, temporaries=max(temporaries))


_GOOD_ENOUGH = 0.9
"""The share of the sequences that the smallest prefill would allow at a time; larger prefills are worth the rest."""


def fit(
    desired: Capacity,
    demand: Demand,
    footprint: Callable[[Capacity], Footprint],
    budget: int,
    least: Capacity | None = None,
    max_rows: int | None = None,
) -> Capacity | None:
    """The capacity that needs at most ``budget`` bytes: ``wanted``, or one with fewer slots, pages and prefill rows.

    Args:
        footprint: Gives the bytes of a capacity; must grow with each of its numbers, and by the same for every page.
        budget: Bytes per device.
        least: The least slots, pages and prefill rows to have.
        max_rows: The most rows of a page table; None for no limit.

    Returns:
        The capacity that lets most sequences decode at a time; None if not even one sequence fits.
    """
    if footprint(desired).total <= budget and tables_fit(desired, max_rows):
        return desired
    if max_rows is not None:
        desired = dataclasses.replace(
            desired.with_slots(min(desired.slots, max_rows)), prefill_rows=min(desired.prefill_rows, max_rows)
        )
    rows, candidates = desired.prefill_rows, []
    while True:
        fitting = _most_sequences(dataclasses.replace(desired, prefill_rows=rows), demand, footprint, budget, least)
        if fitting is not None:
            candidates.append(fitting)
        if rows <= (least.prefill_rows if least else 1):
            break
        rows = max(rows // 2, least.prefill_rows if least else 1)
    if not candidates:
        return None
    best = max(concurrent_sequences(sizes, demand) for sizes in candidates)
    return next(sizes for sizes in candidates if concurrent_sequences(sizes, demand) >= _GOOD_ENOUGH * best)


def tables_fit(sizes: Capacity, max_rows: int | None) -> bool:
    """Whether the page tables of decode and prefill launches have at most ``max_rows`` rows; None is no limit."""
    return max_rows is None or max(sizes.slots, sizes.prefill_rows) <= max_rows


def _most_sequences(
    desired: Capacity,
    demand: Demand,
    footprint: Callable[[Capacity], Footprint],
    budget: int,
    least: Capacity | None,
) -> Capacity | None:
    """The best number of slots and pages with the prefill rows of ``wanted``."""
    fewest = min(desired.pages, demand.longest + 1)
    if least is not None:
        fewest = max(fewest, least.pages)
    best = None
    for slots in range(desired.slots, (least.slots if least else 1) - 1, -1):
        sizes = dataclasses.replace(desired.with_slots(slots), pages=fewest)
        now = footprint(sizes)
        if now.total > budget:
            continue
        page = footprint(dataclasses.replace(sizes, pages=fewest + 1)).pool - now.pool
        most = max(fewest, min(desired.pages, slots * desired.pages_per_sequence + 1))
        room = budget - (now.weights + now.pool + now.temporaries)
        sizes = dataclasses.replace(sizes, pages=min(most, fewest + max(0, room) // max(1, page)))
        if best is None or concurrent_sequences(sizes, demand) > concurrent_sequences(best, demand):
            best = sizes
    return best


def concurrent_sequences(sizes: Capacity, demand: Demand) -> float:
    """Sequences of average length that all replicas decode at a time."""
    return min(float(sizes.sequences), len(sizes.active_replicas) * max(1.0, (sizes.pages - 1) / demand.mean))


def smallest(desired: Capacity, longest: int) -> Capacity:
    """The smallest capacity for one sequence of ``longest`` pages."""
    return dataclasses.replace(desired.with_slots(1), pages=min(desired.pages, longest + 1), prefill_rows=1)
