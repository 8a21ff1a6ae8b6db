"""The chosen layout and capacity, and why: in numbers for programs, in words for people."""

import dataclasses
from collections.abc import Mapping

from lockstep.engine.config import EngineConfig, Layout, layout_text
from lockstep.engine.schedule import Capacity
from lockstep.engine.sizing.cost_model import Estimate, verify_costs
from lockstep.engine.sizing.demand import Demand
from lockstep.engine.sizing.memory_model import Footprint
from lockstep.hosts import digest
from lockstep.printable import bytes_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout that was considered."""

    layout: Layout  # the layout, such as `training` or `{tensor: N}`
    demand: Demand  # what the requests ask for, in pages of this layout
    wanted: Capacity  # the capacity for the requests and the caps, whatever memory there is
    sizes: Capacity | None  # the capacity that fits; None if not even one sequence does
    footprint: Footprint  # predicted bytes of `sizes`; of the smallest capacity that could be, if none fits
    estimate: Estimate | None  # predicted seconds; None if nothing fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizing:
    """Layout and capacity in use; the same on every host."""

    layout: Layout  # the layout, such as `training` or `{tensor: N}`
    wanted: Capacity  # the capacity for the requests and the caps, whatever memory there is
    sizes: Capacity
    reasons: Mapping[str, tuple[int, str]]  # values of sizes, and what bounds each: a cap, memory, another
    predicted: Footprint  # bytes per device, before anything was compiled
    compiled: Footprint | None  # the same by the compiler's memory analysis; None before
    free: int  # bytes on the device with the least free memory of all hosts, before the engine took any
    utilization: float  # the share of `free` that may be used
    max_prompts: int  # number of prompts that the scheduler has at a time
    estimate: Estimate
    considered: tuple[Choice, ...]  # all layouts that were compared, the chosen one included
    chip: str  # the name of the chip whose numbers the prediction used
    kv_dtype: str
    weight_dtype: str  # the dtype of the weights of the layers' matrix products
    attention: str
    kept: str  # what the layers keep of the past, and what that rules out
    shares_prefixes: bool  # whether sequences read the pages of others that begin as they do

    @property
    def budget(self) -> int:
        """Bytes per device that may be used."""
        return int(self.free * self.utilization)

    @property
    def headroom(self) -> int:
        """Bytes per device that stay free at the moment when most are in use."""
        return self.free - (self.compiled or self.predicted).total

    @property
    def verify_costs(self) -> dict[int, float]:
        """The time of a step that verifies drafts, in decode steps, by its width."""
        return verify_costs(self.sizes, self.estimate)

    @property
    def schedule(self) -> dict[str, str]:
        """The values besides the requests that decide which program is launched next, by name, for hosts to agree on.

        No program has it: the costs may come from a calibration file, which each host reads for itself.
        """
        return {"schedule (costs by calibration)": digest(repr((self.sizes, self.max_prompts, self.verify_costs)))}

    def describe(self) -> str:
        """A few lines for people: where the bytes go, what bounds each size, which layouts were compared."""
        need = self.compiled or self.predicted
        source = "by the compiler" if self.compiled else "predicted"
        text = bytes_text
        replicas = f"{len(self.sizes.active_replicas)} replicas" + f" of {self.sizes.replicas}" * bool(
            self.sizes.idle_replicas
        )
        lines = [
            f"layout {layout_text(self.layout)}, {replicas}, {self.sizes.slots} sequences in each",
            f"memory per device, {source}: {text(need.weights)} decode weights in {self.weight_dtype}, "
            f"{text(need.pool)} KV cache in {self.kv_dtype}, {text(need.temporaries)} temporaries, "
            f"{text(need.reshard)} while weights move; "
            f"{text(need.total)} at the worst moment of {text(self.budget)} (hbm_utilization {self.utilization:g} of "
            f"the {text(self.free)} on the device with the least free memory of all hosts); {text(self.headroom)} stay "
            "free",
        ]
        if self.compiled:
            lines[-1] += f"; {bytes_text(self.predicted.total)} were predicted"
        lines.append(f"attention: {self.attention}")
        lines.append(f"kept of the past: {self.kept}")
        lines += [f"  {name} {value}: {why}" for name, (value, why) in self.reasons.items()]
        lines.append(f"predicted with the numbers of {self.chip}, at best:")
        for choice in self.considered:
            mark = "*" if choice.layout == self.layout else " "
            lines.append(f"{mark} {layout_text(choice.layout)}: {_outlook(choice)}")
        return "\n".join(lines)


def _outlook(choice: Choice) -> str:
    if choice.estimate is None or choice.sizes is None:
        return f"does not fit: one sequence needs {bytes_text(choice.footprint.total)} per device"
    estimate = choice.estimate
    return (
        f"{1e3 * estimate.step_s:.3g} ms per step of {estimate.active:.4g} sequences ({1e3 * estimate.memory_s:.3g} ms "
        f"memory, {1e3 * estimate.compute_s:.3g} ms compute, {1e3 * estimate.collectives_s:.3g} ms collectives), "
        f"{1e3 * estimate.reshard_s:.3g} ms to move the weights, {estimate.active / estimate.step_s:.4g} tokens/s, "
        f"{estimate.total_s:.3g} s in all, {bytes_text(choice.footprint.total)} per device"
    )


def reasons(
    config: EngineConfig,
    desired: Capacity,
    sizes: Capacity,
    demand: Demand,
    max_prompts: int,
    page_size: int,
    max_rows: int | None,
) -> dict[str, tuple[int, str]]:
    """The value of each size by its name in `EngineConfig`, and what bounds it.

    Args:
        max_prompts: The number of prompts that the scheduler has at a time.
        page_size: Tokens in a page if page tables could be of any size.
        max_rows: The most rows of a page table; None for no limit.
    """
    page, num_prompts = sizes.page_size, len(demand.generations)
    prompt_rows = max(1, sizes.slots * -(-demand.prefill // page))
    # Name in the configuration, value, value if there were memory, value that the requests would need, in its unit.
    every = (
        ("max_seqs", sizes.sequences, desired.sequences, demand.sequences),
        ("max_pages", sizes.pages, desired.pages, sizes.slots * min(demand.longest, sizes.pages_per_sequence) + 1),
        ("max_prefill_size", sizes.prefill_rows * page, desired.prefill_rows * page, prompt_rows * page),
        ("max_steps_per_launch", sizes.steps, desired.steps, demand.new_tokens),
    )
    bounds = {}
    if page > page_size:
        bounds["page_size"] = (page, f"page tables of pages of {page_size} do not fit in scalar memory")
    crowded = set()
    if max_rows is not None:
        rows = {"max_seqs": sizes.slots, "max_prefill_size": sizes.prefill_rows}
        crowded = {name for name, used in rows.items() if used >= max_rows}
    for name, value, roomy, need in every:
        if value < roomy and value < need:
            why = "scalar memory" if name in crowded else "memory"
        elif value >= need:
            why = "all requests fit"
        else:
            why = "default" if getattr(config, name) is None else "cap given"
        bounds[name] = (value, why)
    count, why = bounds["max_seqs"]
    if why in ("default", "cap given") and config.max_prompts_per_batch and count != config.max_seqs:
        bounds["max_seqs"] = (count, "max_prompts_per_batch")
    if max_prompts >= num_prompts:
        why = "all requests fit"
    else:
        why = "fills max_seqs twice" if config.max_prompts_per_batch is None else "cap given"
    bounds["max_prompts_per_batch"] = (min(max_prompts, num_prompts), why)
    return bounds
