"""A plan as tables at the terminal."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.engine import layout_text
from lockstep.placement import PP
from lockstep.placement.device import TILE
from lockstep.plan.fsdp import FsdpBytes, ThinPieces
from lockstep.plan.planner import Plan, SamplingPlan
from lockstep.plan.step_time import DECODE_ERRORS, DECODE_OVER_BEST, EXPECTED_ERRORS, StepTime, train_time
from lockstep.plan.summary import RolloutStep, moments, rollout_step, run_cost, stop_time
from lockstep.printable import bytes_text, seconds_text
from lockstep.xla import CollectiveSum, vmem

_NAMED: Final = 4  # the most weights that a warning names


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan."""
    mesh = ", ".join(f"{name} {size}" for name, size in plan.mesh_shape.items())
    console.print(f"[bold]{plan.workload.command}[/] on [bold]{escape(plan.topology.describe())}[/]", highlight=False)
    if mesh:
        console.print(
            f"mesh ({mesh}){' on each host' if plan.workload.one_host else ''}, {plan.chip.name}", highlight=False
        )
    if stages := _pipeline(plan):
        console.print(stages, highlight=False, soft_wrap=True)
    for note in plan.workload.notes:
        console.print(f"[dim]- {escape(note)}[/]", highlight=False)
    console.print()
    if plan.training or plan.sampling:
        console.print(_memory(plan))
        console.print(_programs(plan))
        console.print(_traffic(plan))
        if plan.fsdp is not None:
            _print_fsdp(plan.fsdp, console)
        console.print(_speed(plan))
        console.print(_expected(plan), highlight=False, soft_wrap=True)
        if plan.topology.num_slices > 1 and (time := train_time(plan)):
            console.print(_between_slices(plan, time), highlight=False, soft_wrap=True)
        if any(one.drafts for one in plan.sampling):
            console.print(_drafts(plan))
        if split := rollout_step(plan):
            console.print(_split(split), highlight=False)
        if plan.workload.model.exact:
            console.print(_exact(plan), highlight=False, soft_wrap=True)
        if plan.training:
            console.print(_checkpoint(plan), highlight=False)
        for one in plan.sampling:
            console.print(_sizes(one))
            console.print(_considered(one))
        console.print(
            f"[dim]predicted at best, not measured; {plan.chip.name}: {bytes_text(plan.memory)} HBM, "
            f"{plan.chip.bandwidth / 1e9:.4g} GB/s, {plan.chip.flops / 1e12:.4g} TFLOP/s, "
            f"{plan.chip.link.bandwidth / 1e9:.4g} GB/s over its links, {seconds_text(plan.chip.link.latency_s)} for a "
            f"collective and {seconds_text(plan.chip.link.hop_s)} for each of its hops ({escape(plan.chip.source)})[/]",
            highlight=False,
        )
        console.print()
    _verdict(plan, console)


def _table(title: str, *columns: str) -> Table:
    # The title is the head of the first column: above the table it would be broken at the table's width.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate((title, *columns)):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def _memory(plan: Plan) -> Table:
    every = moments(plan)
    worst = max(moment.total for moment in every)
    names = [f"{moment.name}{' (worst)' if moment.total == worst else ''}" for moment in every]
    table = _table("HBM per device", *names)
    for part in every[0].parts:
        if any(moment.parts[part] for moment in every):
            table.add_row(part, *(bytes_text(moment.parts[part]) if moment.parts[part] else "-" for moment in every))
    table.add_section()
    table.add_row("total", *(bytes_text(moment.total) for moment in every), style="bold")
    style = "red" if any(moment.headroom < 0 for moment in every) else "green"
    table.add_row(
        f"headroom of {bytes_text(plan.memory)}", *(bytes_text(moment.headroom) for moment in every), style=style
    )
    return table


def _programs(plan: Plan) -> Table:
    table = _table("programs", "VMEM of the hungriest operation", "digest")
    if plan.training is not None:
        summary = plan.training.summary
        table.add_row("train step", bytes_text(vmem(summary.text)), summary.digest[:12])
    for one in plan.sampling:
        for name, digest in one.digests.items():
            table.add_row(_named(one, name), bytes_text(one.vmem[name]), digest[:12])
    return table


def _traffic(plan: Plan) -> Table:
    table = _table("collectives", "kind", "times", "received", "devices", "across")

    def rows(name: str, found: Iterable[CollectiveSum]) -> None:
        none = True
        for one in found:
            crosses = "slices" if one.crosses_slices else "hosts" if one.crosses_hosts else "chips"
            table.add_row(name, one.kind, f"{one.count:,}", bytes_text(one.bytes), str(one.devices), crosses)
            name, none = "", False
        if none:
            table.add_row(name, "none", "", "", "", "")

    if plan.training is not None:
        rows("per train step", plan.training_collectives)
    for one in plan.sampling:
        if "reshard" in one.collectives:
            rows(_named(one, "per move of the weights"), one.collectives["reshard"])
        rows(_named(one, "per decoded token"), one.step_collectives)
        rows(_named(one, f"once per launch of {one.sizing.sizes.steps} steps"), one.collectives["decode"])
    return table


def _print_fsdp(fsdp: FsdpBytes, console: Console) -> None:
    if fsdp.ratio is not None:
        console.print(
            f"FSDP needs {bytes_text(fsdp.floor)} per device and train step (weights gathered, gradients scattered); "
            f"{bytes_text(fsdp.received)} are received between data-parallel devices, {fsdp.ratio:.2f} of it",
            highlight=False,
            soft_wrap=True,
        )
    if fsdp.thin:
        console.print(f"[bold yellow]warning[/]: {escape(_thin(fsdp.thin))}", highlight=False, soft_wrap=True)
    console.print()


def _thin(pieces: Sequence[ThinPieces]) -> str:
    named = [f"{one.parameter} ({one.axis}: {one.size:,} in pieces of {one.piece})" for one in pieces[:_NAMED]]
    more = f" and {len(pieces) - _NAMED} more (--json has them)" if len(pieces) > _NAMED else ""
    worst = min(pieces, key=lambda one: one.size // one.tile)
    largest = worst.size // worst.tile
    fix = f"make fsdp in trainer.mesh_shape at most {largest}, and dp or tp larger" if largest else "the model is small"
    return (
        f"{', '.join(named)}{more}: pieces thinner than a tile of the TPU ({worst.tile} along {worst.axis}) are stored "
        f"and sent with padding; {fix}."
    )


def _speed(plan: Plan) -> Table:
    table = _table("time at best", "memory (floor)", "compute", "collectives", "together", "tokens/s", "per chip")
    chips = plan.topology.chips
    time = train_time(plan)
    if time is not None:
        rate = time.tokens / time.step_s
        table.add_row(
            "train step", seconds_text(time.memory_s), seconds_text(time.compute_s), seconds_text(time.collectives_s),
            seconds_text(time.step_s), f"{rate:,.0f}", f"{rate / chips:,.0f}",
        )  # fmt: skip
    for one in plan.sampling:
        found = one.sizing.estimate
        # With a mesh on each host, the prediction is that of one host.
        groups = plan.topology.hosts if plan.workload.one_host else 1
        rate = groups * found.active / found.step_s
        table.add_row(
            _named(one, f"decode step of {groups * found.active:.4g} sequences"),
            seconds_text(found.memory_s), seconds_text(found.compute_s), seconds_text(found.collectives_s),
            seconds_text(found.step_s), f"{rate:,.0f}", f"{rate / chips:,.0f}",
        )  # fmt: skip
    return table


def _expected(plan: Plan) -> str:
    """The times that published steps make one expect, and the cost of the whole run then."""
    lines = []
    if time := train_time(plan):
        rate = time.tokens / time.expected_s
        lines.append(
            f"expected: train step {seconds_text(time.expected_s)} ({_errors(EXPECTED_ERRORS)} in published steps), "
            f"{rate:,.0f} tokens/s"
        )
    for one in plan.sampling:
        step_s = DECODE_OVER_BEST * one.sizing.estimate.step_s
        lines.append(_named(one, f"decode step {seconds_text(step_s)} ({_errors(DECODE_ERRORS)})"))
    if cost := run_cost(plan):
        dollars = "" if cost.dollars is None else f", ${cost.dollars:,.0f} at ${plan.dollars_per_chip_hour:g} each"
        lines.append(
            f"the run's {cost.steps:,} steps of {seconds_text(cost.step_s)}: {cost.chip_hours:,.4g} chip hours{dollars}"
        )
    return "\n".join(lines) + "\n"


def _errors(lowest_and_highest: tuple[float, float]) -> str:
    return " to ".join(f"{error:+.0%}" for error in lowest_and_highest)


def _pipeline(plan: Plan) -> str | None:
    if plan.training is None or PP not in plan.mesh_shape:
        return None
    assert plan.workload.training is not None
    count, stages = plan.training.microbatches, plan.mesh_shape[PP]
    repeats = plan.workload.training.trainer.pipeline_repeats
    times, steps = (f" {repeats} times", "v m") if repeats > 1 else ("", "m")
    return (
        f"{count} microbatches pass{times} through {stages} stages; the bubble, in which a stage has none, is "
        f"{plan.training.bubble:.1%} of the steps, (p - 1) / ({steps} + p - 1)"
    )


def _between_slices(plan: Plan, time: StepTime) -> str:
    work = "hand on microbatches, and add up their gradients" if PP in plan.mesh_shape else "add up their gradients"
    moved = f"{plan.topology.num_slices} slices {work} once a step: {bytes_text(time.slices_bytes)}"
    if plan.chip.dcn is None:
        return f"{moved} per device; no rate of the data-centre network is published here for {plan.chip.name}\n"
    rate = plan.chip.dcn * plan.topology.devices_per_host / 1e9
    text = f"{moved} per device at {rate:.4g} GB/s per host take {seconds_text(time.slices_s)}\n"
    rest = max(time.compute_s, time.memory_s, time.collectives_s)
    if time.slices_s > rest:
        text += (
            f"[bold yellow]warning[/]: that cannot hide behind a step of {seconds_text(rest)}; use larger batches, "
            "trainer.dcn_reduce_dtype: bfloat16, or one larger slice\n"
        )
    return text


def _drafts(plan: Plan) -> Table:
    """The speed that verifying promises, beside that of decoding one token after the other."""
    table = _table("if all drafts are right", "moved per token", "decoded", "a step", "tokens/s", "per chip")
    groups, chips = plan.topology.hosts if plan.workload.one_host else 1, plan.topology.chips
    for one in plan.sampling:
        for each in one.drafts:
            rate = groups * each.tokens_per_s
            table.add_row(
                _named(one, f"{each.width} tokens at a time"),
                bytes_text(int(each.bytes_per_accepted_token)), bytes_text(int(each.bytes_per_decoded_token)),
                seconds_text(each.step_s), f"{rate:,.0f}", f"{rate / chips:,.0f}",
            )  # fmt: skip
    return table


def _split(split: RolloutStep) -> str:
    return (
        f"a step: {seconds_text(split.step_s)}, of which rollout {seconds_text(split.rollout_s)} "
        f"({split.rollout_s / split.step_s:.0%}, without prefill) and update {seconds_text(split.update_s)}\n"
    )


def _exact(plan: Plan) -> str:
    found = []
    if time := train_time(plan):
        merging = f", {seconds_text(time.merge_s)} of them merging adapters" if time.merge_s else ""
        moved = f" ({bytes_text(time.merge_bytes)} read and written)" if time.merge_s else ""
        found.append(f"a train step {seconds_text(time.exact_s)} more{merging}{moved}")
    for one in plan.sampling:
        step = one.sizing.estimate
        fast = dataclasses.replace(step, memory_s=step.memory_s - step.reread_s)
        found.append(
            _named(one, f"decode steps of {seconds_text(step.step_s)}, {seconds_text(fast.step_s)} with numerics fast")
        )
    return f"the price of numerics exact, which multiplies {TILE} rows at a time: {'; '.join(found)}\n"


def _checkpoint(plan: Plan) -> str:
    stop = stop_time(plan)
    if stop.with_pending_s <= stop.grace_s:
        fits = "it fits"
    elif stop.seconds <= stop.grace_s:
        fits = "it fits; a save that is under way then counts as the last, and the steps after it are lost"
    else:
        fits = "it does not fit: what came after the last checkpoint is lost then"
    return (
        f"a checkpoint: {bytes_text(plan.checkpoint)} on the busiest host, {seconds_text(stop.save_s)} if each writes "
        f"{plan.write_bandwidth / 1e9:.4g} GB/s (--write_bandwidth)\n"
        f"SIGTERM leaves {stop.grace_s:g} s: {stop.steps} step{'s' * (stop.steps > 1)} at best and the save take "
        f"{seconds_text(stop.seconds)}, {seconds_text(stop.with_pending_s)} if another is under way; {fits}\n"
    )


def _sizes(one: SamplingPlan) -> Table:
    sizing = one.sizing
    table = _table(
        f"{one.workload.name or 'sampling'}: layout {layout_text(sizing.layout)}, {sizing.sizes.replicas} replicas, "
        f"{sizing.sizes.slots} sequences in each",
        "chosen",
        "bounded by",
    )
    for name, (value, why) in sizing.reasons.items():
        table.add_row(one.workload.key(name), f"{value:,}", why)
    table.caption = f"attention: {sizing.attention}"
    return table


def _considered(one: SamplingPlan) -> Table:
    table = _table("layouts considered", "per device", "decode step", "moving weights", "whole round")
    for choice in one.sizing.considered:
        mark = "* " if choice.layout == one.sizing.layout else "  "
        found = choice.estimate
        times = ["does not fit", "", ""] if found is None else [
            seconds_text(found.step_s), seconds_text(found.reshard_s), seconds_text(found.total_s)
        ]  # fmt: skip
        table.add_row(mark + layout_text(choice.layout), bytes_text(choice.footprint.total), *times)
    return table


def _verdict(plan: Plan, console: Console) -> None:
    if plan.fits:
        worst = max(moments(plan), key=lambda moment: moment.total)
        console.print(
            f"[bold green]fits[/]: {bytes_text(worst.headroom)} of {bytes_text(plan.memory)} stay free per device at "
            f"the worst moment ({worst.name})",
            highlight=False,
        )
        return
    for each in plan.infeasibilities:
        console.print(f"[bold red]does not fit[/]: {escape(each.text)}", highlight=False, soft_wrap=True)
        if each.largest is not None:
            console.print(
                f"  {each.key} is {each.value}; the largest that works is [bold]{each.largest}[/]", highlight=False
            )
        console.print(f"  change {each.key} at {escape(each.place)}", highlight=False, soft_wrap=True)


def _named(one: SamplingPlan, what: str) -> str:
    return f"{one.workload.name}: {what}" if one.workload.name else what
