"""Layout and capacities from agreed numbers alone: the same decision on every host."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.attention import describe_attention
from lockstep.device import chip_of
from lockstep.engine.config import EngineConfig, Layout, resting_replicas, tensor_size
from lockstep.engine.decoder.kv_replication import replicate_kv_heads
from lockstep.engine.sizing.cost_model import estimate, one_per_memory
from lockstep.engine.sizing.demand import Demand, fits_model, prompts_at_a_time, slots_per_replica, work_out_sizes
from lockstep.engine.sizing.fit import fit
from lockstep.engine.sizing.memory_model import Footprint, Shapes
from lockstep.engine.sizing.result import Choice, Sizing, layout_text, reasons
from lockstep.errors import CapacityError
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement.decode_mesh import make_decode_mesh, tensor_sizes
from lockstep.schedule import Capacity, check_capacity
from lockstep.types import Request
from lockstep.units import bytes_text


class Chooser:
    """Works out what suits a model on a mesh.

    Args:
        config: caps, layout, ``hbm_utilization``.
        model: of the model.
        weights: arrays or shape structs with shardings.
        mesh: that the model is sharded over.
        free: bytes on the fullest device of all hosts; agreed on.
        excess: by layout, bytes that the compiler was found to need beyond the prediction.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LlamaConfig,
        weights: DecoderWeights,
        mesh: Mesh,
        free: int,
        excess: Mapping[str, int] | None = None,
    ) -> None:
        self._config, self._model, self._weights, self._mesh = config, model, weights, mesh
        self._free = free
        self._excess = excess or {}
        self._budget = int(free * config.hbm_utilization)

    def choose(self, requests: Sequence[Request], before: Sizing | None = None) -> Sizing:
        """The layout with the least predicted time of those that fit, and its capacities.

        Args:
            requests: at least one; checked.
            before: in use so far for the same model. Its layout is kept while anything fits in it; what it has is kept
                or grows, unless longer sequences leave no room for as many.

        Raises:
            ConfigError: a capacity or layout beyond what the model can do.
            CapacityError: a request that can never fit: the caps, the model or the memory.
        """
        layouts = self.layouts() if before is None else [before.layout]
        choices = [self._consider(layout, requests, before) for layout in layouts]
        fitting = [choice for choice in choices if choice.sizes is not None]
        if not fitting and before is not None:
            return self.choose(requests)
        if not fitting:
            raise CapacityError(self._too_small(choices, requests))
        best = min(fitting, key=lambda choice: choice.estimate.total_s if choice.estimate else 0.0)
        assert best.sizes is not None and best.estimate is not None
        check_capacity(best.sizes, requests)
        demand = Demand.of(requests, best.sizes.page_size)
        longest = max(len(request.prompt_tokens) for request in requests) - 1
        rows = max(1, best.sizes.slots * -(-longest // best.sizes.page_size))
        max_prompts = prompts_at_a_time(self._config, best.sizes, requests)
        return Sizing(
            layout=best.layout,
            wanted=best.wanted,
            sizes=best.sizes,
            reasons=reasons(self._config, best.wanted, best.sizes, demand, rows, max_prompts, len(requests)),
            predicted=best.footprint,
            compiled=None,
            free=self._free,
            utilization=self._config.hbm_utilization,
            max_prompts=max_prompts,
            estimate=best.estimate,
            considered=tuple(choices),
            chip=chip_of(self._mesh.devices.flat[0]).name,
            kv_dtype=self._shapes(best.layout).cache_dtype.name,
            attention=describe_attention(self._mesh.devices.flat[0], self._model.head_size),
        )

    def layouts(self) -> list[Layout]:
        """Those to compare: the configured one, or all that the mesh and the model allow."""
        return [self._config.layout] if self._config.layout != "auto" else self._possible()

    def _possible(self) -> list[Layout]:
        # More devices than kv heads work too, but hold K and V several times: only where somebody asks for it.
        most = self._model.num_kv_heads
        sizes = [t for t in tensor_sizes(self._mesh.shape) if t <= most and fits_model(self._model, t)]
        few = one_per_memory(make_decode_mesh(self._mesh, 1))
        fewer: list[Layout] = [{"tensor": 1, "replicas": few}] if few else []
        return [*({"tensor": tensor} for tensor in sizes), *fewer, "training"]

    def _shapes(self, layout: Layout) -> Shapes:
        dtype = jnp.dtype(self._config.dtype or self._weights.embed.dtype)
        decode_mesh = make_decode_mesh(self._mesh, tensor_size(layout) or 1)
        model, weights = replicate_kv_heads(self._model, self._weights, decode_mesh.tensor)
        return Shapes(
            config=model,
            weights=weights,
            decode_mesh=decode_mesh,
            dtype=dtype,
            gather=layout != "training",
            kv_dtype=self._config.kv_dtype(dtype),
        )

    def _consider(self, layout: Layout, requests: Sequence[Request], before: Sizing | None) -> Choice:
        shapes = self._shapes(layout)
        old = before if before is not None and before.layout == layout else None
        device = self._mesh.devices.flat[0]
        slots = slots_per_replica(device.device_kind, device.platform, shapes.dtype.itemsize)
        resting = resting_replicas(layout, shapes.decode_mesh.replicas)
        wanted = work_out_sizes(
            self._config, self._model, shapes.decode_mesh, requests, old.wanted if old else None, slots, resting
        )
        check_capacity(wanted, requests)
        demand = Demand.of(requests, wanted.page_size)
        budget = self._budget - self._excess.get(layout_text(layout), 0)
        if old is not None and wanted == old.wanted and demand.longest <= old.sizes.pages - 1:
            sizes: Capacity | None = old.sizes
        else:
            sizes = fit(wanted, demand, shapes.footprint, budget, old.sizes if old else None)
            if sizes is None and old is not None:
                sizes = fit(wanted, demand, shapes.footprint, budget)
        seconds = None
        if sizes is not None:
            seconds = estimate(shapes, sizes, demand, chip_of(self._mesh.devices.flat[0]))
        return Choice(
            layout=layout,
            wanted=wanted,
            sizes=sizes,
            footprint=shapes.footprint(sizes or _smallest(wanted, demand.longest)),
            estimate=seconds,
        )

    def _too_small(self, choices: Sequence[Choice], requests: Sequence[Request]) -> str:
        """What was needed, what there is, the largest that works, and which knob to turn."""
        hungry = max(requests, key=lambda r: len(r.prompt_tokens) + r.params.max_new_tokens)
        prompt, new = len(hungry.prompt_tokens), hungry.params.max_new_tokens
        best = min(choices, key=lambda choice: self._needed(choice))
        need, layout = best.footprint, best.layout
        temporaries = need.temporaries + self._excess.get(layout_text(layout), 0)
        longest = self._longest(best)
        ways = []
        if longest > new:
            ways.append(f"shorten the prompt to at most {longest - new} tokens")
        if longest > prompt:
            ways.append(f"lower max_new_tokens to at most {longest - prompt}")
        cap = self._config.max_seq_len
        if longest > 0 and cap is not None and cap > longest:
            ways.append(f"lower max_seq_len to at most {longest}")
        others = [o for o in self._possible() if o not in [c.layout for c in choices]] if len(choices) == 1 else []
        works = [layout_text(o) for o in others if self._consider(o, requests, None).sizes is not None]
        if works:
            ways.append(f"set layout to auto or {' or '.join(works)}")
        share = self._needed(best) / self._free if self._free else float("inf")
        if share <= 1.0:
            ways.append(f"raise hbm_utilization to at least {_up(share)}")
        ways.append("free device memory, or use more devices or larger ones")
        fix = ", or ".join(ways)
        reach = f"The longest sequence that fits is {longest} tokens." if longest > 0 else "Not one token fits."
        return (
            f"prompt {hungry.prompt_id} has {prompt} tokens and max_new_tokens is {new}; decoding it alone needs "
            f"{bytes_text(self._needed(best))} per device in layout {layout_text(layout)} ({bytes_text(need.weights)} "
            f"decode weights, {bytes_text(need.pool)} KV cache, {bytes_text(temporaries)} temporaries, "
            f"{bytes_text(need.reshard)} while weights move). There are {bytes_text(self._budget)}: hbm_utilization "
            f"{self._config.hbm_utilization:g} of the {bytes_text(self._free)} that the fullest device of all hosts "
            f"has free. {reach} {fix[0].upper()}{fix[1:]}."
        )

    def _needed(self, choice: Choice) -> int:
        return choice.footprint.total + self._excess.get(layout_text(choice.layout), 0)

    def _longest(self, choice: Choice) -> int:
        """Tokens of the longest sequence that fits alone; 0 if none does."""
        shapes, wanted = self._shapes(choice.layout), choice.wanted
        budget = self._budget - self._excess.get(layout_text(choice.layout), 0)

        def fits(pages: int) -> bool:
            need: Footprint = shapes.footprint(_smallest(wanted, pages, pages))
            return need.total <= budget

        low, high = 0, wanted.pages_per_sequence
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * wanted.page_size


def _smallest(wanted: Capacity, longest: int, width: int | None = None) -> Capacity:
    """Sizes for one sequence of so many pages."""
    return dataclasses.replace(
        wanted,
        slots=1,
        sequences=min(wanted.sequences, len(wanted.active_replicas)),
        pages=min(wanted.pages, longest + 1),
        prefill_rows=1,
        pages_per_sequence=width or wanted.pages_per_sequence,
    )


def _up(share: float) -> str:
    return f"{int(share * 1000) / 1000 + 0.001:.3f}"
