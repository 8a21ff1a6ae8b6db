"""Layout and capacity from agreed numbers alone: the same decision on every host."""

import dataclasses
from collections.abc import Mapping, Sequence

from lockstep.engine.config import EngineConfig, Layout, layout_text
from lockstep.engine.decode_model import DecodeModel, DecodeModels
from lockstep.engine.schedule import Capacity, check_capacity
from lockstep.engine.sizing.cost_model import estimate
from lockstep.engine.sizing.demand import Demand, desired_capacity, larger_page_size, max_prompts, measure_demand
from lockstep.engine.sizing.memory_model import MemoryModel, concurrent_sequences, fit, smallest, tables_fit
from lockstep.engine.sizing.result import Choice, Sizing, reasons
from lockstep.errors import CapacityError, ConfigError
from lockstep.models.attention import describe_attention, max_page_table_rows
from lockstep.models.attention.kv import describe_kept, shareable
from lockstep.placement.device import Chip, calibrated, chip_of, platform_of
from lockstep.printable import bytes_text
from lockstep.types import Request

_WORTH_COMPILING = 1.25
"""The factor of sequences decoded at a time that makes a larger capacity worth compiling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chooser:
    """Chooses the layout and the capacity for requests."""

    config: EngineConfig
    models: DecodeModels
    requests: Sequence[Request]  # at least one; checked
    free: int  # bytes on the device with the least free memory of all hosts, agreed on
    excess: Mapping[str, int] = dataclasses.field(default_factory=dict)  # bytes beyond the prediction, by layout

    def choose(self, before: Sizing | None = None) -> Sizing:
        """The layout with the least predicted time of those that fit, and its capacity.

        Args:
            before: The sizing in use for the same model. Its layout is kept while anything fits in it. Its capacity is
                kept, for another one is compiled; it grows where memory for `_WORTH_COMPILING` times the sequences
                is free, and shrinks where longer sequences or less memory leave no room for as many.

        Raises:
            ConfigError: A capacity or layout is beyond what the model can do.
            CapacityError: A request can never fit: the caps, the model or the memory.
        """
        layouts = self.models.layouts if before is None else [before.layout]
        demand = measure_demand(self.config, self.models, self.requests)
        choices = [self._consider(self.models[layout], demand, before) for layout in layouts]
        check_capacity(choices[0].wanted, self.requests)  # caps are the same in every layout
        fitting = [choice for choice in choices if choice.sizes is not None]
        if not fitting and before is not None:
            return self.choose()
        if not fitting:
            raise CapacityError(self._too_small(choices, demand))
        best = min(fitting, key=lambda choice: choice.estimate.total_s if choice.estimate else 0.0)
        assert best.sizes is not None and best.estimate is not None
        check_capacity(best.sizes, self.requests)
        model, prompts = self.models[best.layout], max_prompts(self.config, best.sizes, demand)
        rows = self._max_rows(model, best.sizes)
        page_size = best.demand.page_size if model.heads.context > 1 else demand.page_size
        return Sizing(
            layout=best.layout,
            wanted=best.wanted,
            sizes=best.sizes,
            reasons=reasons(self.config, best.wanted, best.sizes, best.demand, prompts, page_size, rows),
            predicted=best.footprint,
            compiled=None,
            free=self.free,
            utilization=self.config.hbm_utilization,
            max_prompts=prompts,
            estimate=best.estimate,
            considered=tuple(choices),
            chip=self._chip(model).name + (f" and {self.config.calibration}" if self.config.calibration else ""),
            kv_dtype=model.kv_dtype.name,
            weight_dtype=(model.quantized_dtype or model.dtype).name,
            attention=describe_attention(model.device, model.heads, exact=model.config.exact),
            kept=describe_kept(model.kept, model.kv_dtype),
            shares_prefixes=self.config.share_prefixes and shareable(model.kept),
        )

    def _consider(self, model: DecodeModel, demand: Demand, before: Sizing | None = None) -> Choice:
        """The largest capacity of one layout, and its predicted time.

        Pages are no smaller than in ``demand``. They are larger where the configuration allows it and page tables need
        it, or where devices split them that copy their part of a page at a time.
        """
        old = before if before is not None and before.layout == model.layout else None
        if old is not None and self.config.page_size is None and old.sizes.page_size > demand.page_size:
            demand = Demand.of(self.requests, old.sizes.page_size)
        if model.heads.context > 1 and platform_of(model.device.platform).pages_one_by_one:
            demand = Demand.of(self.requests, larger_page_size(self.config, demand.page_size) or demand.page_size)
        desired, sizes = self._fit(model, demand, old, None)
        while sizes is not None and not tables_fit(sizes, rows := self._max_rows(model, sizes)):
            larger = larger_page_size(self.config, demand.page_size)
            if larger is not None:
                demand, rows = Demand.of(self.requests, larger), None
            desired, sizes = self._fit(model, demand, old, rows)
        return Choice(
            layout=model.layout,
            demand=demand,
            wanted=desired,
            sizes=sizes,
            footprint=MemoryModel(model).footprint(sizes or smallest(desired, demand.longest)),
            estimate=None if sizes is None else estimate(model, sizes, demand, self._chip(model)),
        )

    def _chip(self, model: DecodeModel) -> Chip:
        """The published numbers of the devices, or those of the configured file."""
        return calibrated(chip_of(model.device), self.config.calibration)

    def _fit(
        self, model: DecodeModel, demand: Demand, old: Sizing | None, max_rows: int | None
    ) -> tuple[Capacity, Capacity | None]:
        """The capacity for a demand if there were memory, and the one that fits, if any."""
        if old is not None and old.sizes.page_size != demand.page_size:
            old = None
        desired = desired_capacity(self.config, model, demand, old.wanted if old else None)
        footprint, budget = MemoryModel(model).footprint, self._budget(model.layout)
        least = old.sizes if old is not None and (old.compiled or old.predicted).total <= self.free else None
        sizes = fit(desired, demand, footprint, budget, least, max_rows)
        if sizes is None and least is not None:
            sizes = fit(desired, demand, footprint, budget, max_rows=max_rows)
        if old is not None and least is not None and desired == old.wanted and demand.longest <= least.pages - 1:
            sizes = _grown(least, sizes, demand)
        return desired, sizes

    def _max_rows(self, model: DecodeModel, sizes: Capacity) -> int | None:
        """The most rows of a page table as wide as that of ``sizes``; None for no limit."""
        # What verifies drafts may look beyond the end of a sequence: `decode` makes its table so much wider.
        beyond = -(-max(sizes.verify_widths, default=0) // sizes.page_size)
        rows = max_page_table_rows(model.device, model.heads, sizes.pages_per_sequence + beyond)
        if rows == 0:
            raise ConfigError(
                f"page_size is {sizes.page_size} tokens and a sequence may have "
                f"{sizes.page_size * sizes.pages_per_sequence}: the page table of one sequence does not fit in the "
                "scalar memory of a TPU core. Set page_size to null or to a larger number."
            )
        return rows

    def _budget(self, layout: Layout) -> int:
        """Bytes per device that the prediction for a layout may come to."""
        return int(self.free * self.config.hbm_utilization) - self._excess(layout)

    def _excess(self, layout: Layout) -> int:
        return self.excess.get(layout_text(layout), 0)

    def _too_small(self, choices: Sequence[Choice], demand: Demand) -> str:
        """The text of an infeasibility: need, room, the largest that works, and the key to change."""
        hungry = max(self.requests, key=lambda r: len(r.prompt_tokens) + r.params.max_new_tokens)
        prompt, new = len(hungry.prompt_tokens), hungry.params.max_new_tokens
        best = min(choices, key=self._needed)
        need, layout = best.footprint, best.layout
        temporaries = need.temporaries + self._excess(layout)
        longest = self._longest(best)
        ways = []
        if longest > new:
            ways.append(f"shorten the prompt to at most {longest - new} tokens")
        if longest > prompt:
            ways.append(f"lower max_new_tokens to at most {longest - prompt}")
        cap = self.config.max_seq_len
        if longest > 0 and cap is not None and cap > longest:
            ways.append(f"lower max_seq_len to at most {longest}")
        asked = [choice.layout for choice in choices]
        untried = (
            []
            if self.config.layout == "auto"
            else [possible for possible in self.models.possible if possible not in asked]
        )
        tried = [self._consider(self.models[untried_layout], demand) for untried_layout in untried]
        works = [layout_text(choice.layout) for choice in tried if choice.sizes is not None]
        if works:
            ways.append(f"set layout to auto or {' or '.join(works)}")
        share = self._needed(best) / self.free if self.free else float("inf")
        if share <= 1.0:
            ways.append(f"raise hbm_utilization to at least {int(share * 1000) / 1000 + 0.001:.3f}")
        ways.append("free device memory, or use more devices or larger ones")
        fix = ", or ".join(ways)
        reach = f"The longest sequence that fits is {longest} tokens." if longest > 0 else "Not one token fits."
        budget = int(self.free * self.config.hbm_utilization)
        return (
            f"prompt {hungry.prompt_id} has {prompt} tokens and max_new_tokens is {new}; decoding it alone needs "
            f"{bytes_text(self._needed(best))} per device in layout {layout_text(layout)} ({bytes_text(need.weights)} "
            f"decode weights, {bytes_text(need.pool)} KV cache, {bytes_text(temporaries)} temporaries, "
            f"{bytes_text(need.reshard)} while weights move). There are {bytes_text(budget)}: hbm_utilization "
            f"{self.config.hbm_utilization:g} of the {bytes_text(self.free)} on the device with the least free memory "
            f"of all hosts. {reach} {fix[0].upper()}{fix[1:]}."
        )

    def _needed(self, choice: Choice) -> int:
        return choice.footprint.total + self._excess(choice.layout)

    def _longest(self, choice: Choice) -> int:
        """Tokens of the longest sequence that fits alone; 0 if none does."""
        memory, desired, budget = MemoryModel(self.models[choice.layout]), choice.wanted, self._budget(choice.layout)

        def fits(pages: int) -> bool:
            alone = dataclasses.replace(smallest(desired, pages), pages_per_sequence=pages)
            return memory.footprint(alone).total <= budget

        low, high = 0, desired.pages_per_sequence
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * desired.page_size


def _grown(used: Capacity, possible: Capacity | None, demand: Demand) -> Capacity:
    """The capacity that is possible now where it is worth compiling, or the one in use."""
    if possible is None:
        return used
    now, then = (min(demand.sequences, concurrent_sequences(sizes, demand)) for sizes in (used, possible))
    return possible if then >= _WORTH_COMPILING * now else used
