"""A plan as tables at the terminal."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from rich import box
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
from lockstep.terminal import Console
from lockstep.xla import CollectiveSum, vmem

_NAMED: Final = 4  # the most weights that a warning names


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan."""
    mesh = ", ".join(f"{name} {size}" for name, size in plan.mesh_shape.items())
    console.print(f"[bold]{plan.workload.command}[/] on [bold]{escape(plan.topology.describe())}[/]")
    if mesh:
        console.print(f"mesh ({mesh}){' on each host' if plan.workload.one_host else ''}, {plan.chip.name}")
    if stages := _pipeline(plan):
        console.print(stages, soft_wrap=True)
    for note in plan.workload.notes:
        console.print(f"[dim]- {escape(note)}[/]")
    console.print()
    if plan.training or plan.sampling:
        console.print(_memory(plan))
        console.print(_programs(plan))
        console.print(_traffic(plan))
        if plan.fsdp is not None:
            _print_fsdp(plan.fsdp, console)
        console.print(_speed(plan))
        console.print(_expected(plan), soft_wrap=True)
        if plan.topology.num_slices > 1 and (time := train_time(plan)):
            console.print(_between_slices(plan, time), soft_wrap=True)
        if any(sampling.drafts for sampling in plan.sampling):
            console.print(_drafts(plan))
        if split := rollout_step(plan):
            console.print(_split(split))
        if plan.workload.model.exact:
            console.print(_exact(plan), soft_wrap=True)
        if plan.training:
            console.print(_checkpoint(plan))
        for sampling in plan.sampling:
            console.print(_sizes(sampling))
            console.print(_considered(sampling))
        console.print(
            f"[dim]predicted at best, not measured; {plan.chip.name}: {bytes_text(plan.memory)} HBM, "
            f"{plan.chip.bandwidth / 1e9:.4g} GB/s, {plan.chip.flops / 1e12:.4g} TFLOP/s, "
            f"{plan.chip.link.bandwidth / 1e9:.4g} GB/s over its links, {seconds_text(plan.chip.link.latency_s)} for a "
            f"collective and {seconds_text(plan.chip.link.hop_s)} for each of its hops ({escape(plan.chip.source)})[/]"
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
    for sampling in plan.sampling:
        for name, digest in sampling.digests.items():
            table.add_row(_named(sampling, name), bytes_text(sampling.vmem[name]), digest[:12])
    return table


def _traffic(plan: Plan) -> Table:
    table = _table("collectives", "kind", "times", "received", "devices", "across")

    def rows(name: str, sums: Iterable[CollectiveSum]) -> None:
        none = True
        for collective in sums:
            crosses = "slices" if collective.crosses_slices else "hosts" if collective.crosses_hosts else "chips"
            table.add_row(
                name,
                collective.kind,
                f"{collective.count:,}",
                bytes_text(collective.bytes),
                str(collective.devices),
                crosses,
            )
            name, none = "", False
        if none:
            table.add_row(name, "none", "", "", "", "")

    if plan.training is not None:
        rows("per train step", plan.training_collectives)
    for sampling in plan.sampling:
        if "reshard" in sampling.collectives:
            rows(_named(sampling, "per move of the weights"), sampling.collectives["reshard"])
        rows(_named(sampling, "per decoded token"), sampling.step_collectives)
        rows(
            _named(sampling, f"once per launch of {sampling.sizing.sizes.steps} steps"), sampling.collectives["decode"]
        )
    return table


def _print_fsdp(fsdp: FsdpBytes, console: Console) -> None:
    if fsdp.ratio is not None:
        console.print(
            f"FSDP needs {bytes_text(fsdp.floor)} per device and train step (weights gathered, gradients scattered); "
            f"{bytes_text(fsdp.received)} are received between data-parallel devices, {fsdp.ratio:.2f} of it",
            soft_wrap=True,
        )
    if fsdp.thin:
        console.print(f"[bold yellow]warning[/]: {escape(_thin(fsdp.thin))}", soft_wrap=True)
    console.print()


def _thin(pieces: Sequence[ThinPieces]) -> str:
    named = [
        f"{piece.parameter} ({piece.axis}: {piece.size:,} in pieces of {piece.piece})" for piece in pieces[:_NAMED]
    ]
    more = f" and {len(pieces) - _NAMED} more (--json has them)" if len(pieces) > _NAMED else ""
    worst = min(pieces, key=lambda piece: piece.size // piece.tile)
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
    for sampling in plan.sampling:
        estimate = sampling.sizing.estimate
        # With a mesh on each host, the prediction is that of one host.
        groups = plan.topology.hosts if plan.workload.one_host else 1
        rate = groups * estimate.active / estimate.step_s
        table.add_row(
            _named(sampling, f"decode step of {groups * estimate.active:.4g} sequences"),
            seconds_text(estimate.memory_s), seconds_text(estimate.compute_s), seconds_text(estimate.collectives_s),
            seconds_text(estimate.step_s), f"{rate:,.0f}", f"{rate / chips:,.0f}",
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
    for sampling in plan.sampling:
        step_s = DECODE_OVER_BEST * sampling.sizing.estimate.step_s
        lines.append(_named(sampling, f"decode step {seconds_text(step_s)} ({_errors(DECODE_ERRORS)})"))
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
    for sampling in plan.sampling:
        for draft in sampling.drafts:
            rate = groups * draft.tokens_per_s
            table.add_row(
                _named(sampling, f"{draft.width} tokens at a time"),
                bytes_text(int(draft.bytes_per_accepted_token)), bytes_text(int(draft.bytes_per_decoded_token)),
                seconds_text(draft.step_s), f"{rate:,.0f}", f"{rate / chips:,.0f}",
            )  # fmt: skip
    return table


def _split(split: RolloutStep) -> str:
    return (
        f"a step: {seconds_text(split.step_s)}, of which rollout {seconds_text(split.rollout_s)} "
        f"({split.rollout_s / split.step_s:.0%}, without prefill) and update {seconds_text(split.update_s)}\n"
    )


def _exact(plan: Plan) -> str:
    prices = []
    if time := train_time(plan):
        merging = f", {seconds_text(time.merge_s)} of them merging adapters" if time.merge_s else ""
        moved = f" ({bytes_text(time.merge_bytes)} read and written)" if time.merge_s else ""
        prices.append(f"a train step {seconds_text(time.exact_s)} more{merging}{moved}")
    for sampling in plan.sampling:
        step = sampling.sizing.estimate
        fast = dataclasses.replace(step, memory_s=step.memory_s - step.reread_s)
        prices.append(
            _named(
                sampling, f"decode steps of {seconds_text(step.step_s)}, {seconds_text(fast.step_s)} with numerics fast"
            )
        )
    return f"the price of numerics exact, which multiplies {TILE} rows at a time: {'; '.join(prices)}\n"


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


def _sizes(sampling: SamplingPlan) -> Table:
    sizing = sampling.sizing
    table = _table(
        f"{sampling.workload.name or 'sampling'}: layout {layout_text(sizing.layout)}, {sizing.sizes.replicas} "
        f"replicas, {sizing.sizes.slots} sequences in each",
        "chosen",
        "bounded by",
    )
    for name, (value, why) in sizing.reasons.items():
        table.add_row(sampling.workload.key(name), f"{value:,}", why)
    table.caption = f"attention: {sizing.attention}"
    return table


def _considered(sampling: SamplingPlan) -> Table:
    table = _table("layouts considered", "per device", "decode step", "moving weights", "whole round")
    for choice in sampling.sizing.considered:
        mark = "* " if choice.layout == sampling.sizing.layout else "  "
        estimate = choice.estimate
        times = ["does not fit", "", ""] if estimate is None else [
            seconds_text(estimate.step_s), seconds_text(estimate.reshard_s), seconds_text(estimate.total_s)
        ]  # fmt: skip
        table.add_row(mark + layout_text(choice.layout), bytes_text(choice.footprint.total), *times)
    return table


def _verdict(plan: Plan, console: Console) -> None:
    if plan.fits:
        worst = max(moments(plan), key=lambda moment: moment.total)
        console.print(
            f"[bold green]fits[/]: {bytes_text(worst.headroom)} of {bytes_text(plan.memory)} stay free per device at "
            f"the worst moment ({worst.name})"
        )
        return
    for reason in plan.infeasibilities:
        console.print(f"[bold red]does not fit[/]: {escape(reason.text)}", soft_wrap=True)
        if reason.largest is not None:
            console.print(f"  {reason.key} is {reason.value}; the largest that works is [bold]{reason.largest}[/]")
        console.print(f"  change {reason.key} at {escape(reason.place)}", soft_wrap=True)


def _named(sampling: SamplingPlan, text: str) -> str:
    return f"{sampling.workload.name}: {text}" if sampling.workload.name else text
