"""How fast the engine is, next to its peers and to the floor.

    python -m benchmarks.decode [--quick] [--json PATH]

Rows are ratios measured side by side in one run; compile time is apart. A peer that is not installed (extra ``[bench]``
for Levanter; transformers' model needs torch) gives null, and so does what ``--quick`` leaves out. Floor: the weights'
matrix products alone; of 16 prompts of 256 tokens also those with the keys and values of the context, see `Floor`.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import (
    Contestant,
    Drawn,
    Floor,
    Levanter,
    Ours,
    Transformers,
    installed,
    keep_freed_memory,
    one_device,
    ratio,
    side_by_side,
)
from benchmarks.shapes import Load, Mix
from benchmarks.workers import report, run_workers, write_json
from lockstep.engine import Gate

SMALL, LARGE = Load(8, 64, 64), Load(16, 256, 128)
MIX, QUICK_MIX = Mix(128, 512, 256, slots=32), Mix(48, 64, 48, slots=8)
GOALS = {
    "decode_vs_floor": (">=", 0.8),
    "prefill_vs_floor": (">=", 0.8),
    "decode_vs_floor_16x256": (">=", 0.8),
    "decode_vs_transformers": (">=", 1.7),
    "decode_vs_levanter": (">=", 3.5),
    "prefill_vs_transformers": (">=", 1.3),
    "prefill_vs_levanter": (">=", 3.0),
    "multiprocess_vs_levanter": (">=", 10.0),
    "compile_vs_levanter": ("<=", 0.3),
    "recompiles": ("<=", 0),
    "filters_vs_plain": (">=", 0.9),
    "mixed_vs_steady": (">=", 0.8),
    "host_share": ("<=", 0.05),
}


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one load, short mixed requests, no several processes: minutes, README.md says how many",
    )
    parser.add_argument("--json", type=Path, help="write one key per row to this file")
    parser.add_argument("--worker", choices=["ours", "levanter"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker)
    console = Console(stderr=True)
    keep_freed_memory()
    rows = measure(arguments.quick, console)
    show(rows, GOALS)
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def measure(quick: bool, console: Console) -> dict[str, Any]:
    """All rows; keys beyond the table's are further figures."""
    rows: dict[str, Any] = dict.fromkeys(GOALS)
    repeats, peers_every = (4, 4) if quick else (6, 3)
    # The short mix takes as many slots as the small load has prompts, and so the same programs.
    ours = Ours(one_device(), **({"max_seqs": QUICK_MIX.slots} if quick else {}))
    contestants: dict[str, Contestant] = {"floor": Floor(), "ours": ours}
    first = {"ours": ours.generate(SMALL, SMALL.new_tokens)}
    console.print(f"ours: first call {first['ours']:.1f} s, compile included")
    if installed("levanter"):
        levanter = contestants["levanter"] = Levanter(SMALL, one_device())
        first["levanter"] = levanter.generate(SMALL, SMALL.new_tokens)
        console.print(f"levanter: first call {first['levanter']:.1f} s, compile included")
        rows["compile_vs_levanter"] = first["ours"] / first["levanter"]
    if installed("torch", "transformers"):
        contestants["transformers"] = Transformers()
    programs = dict(ours.engine.programs)
    for load in (SMALL,) if quick else (SMALL, LARGE):
        if load is LARGE:
            contestants["floor"] = Floor(context=True)
            repeats = peers_every = 3
            contestants.pop("levanter", None)  # no goal needs it here, where one call takes it half a minute
        times = side_by_side(contestants, load, repeats, peers_every=peers_every, warm=first if load is SMALL else ())
        suffix = "" if load is SMALL else "_16x256"
        for name, each in times.items():
            rows[f"{name}_decode_tokens_per_s{suffix}"] = each.decode_rate(load)
            rows[f"{name}_prefill_tokens_per_s{suffix}"] = each.prefill_rate(load)
            console.print(
                f"{load}: {name}: decode {each.decode_rate(load):,.0f} tokens/s, "
                f"prefill {each.prefill_rate(load):,.0f} tokens/s"
            )
        for other in ("floor", "transformers", "levanter"):
            rows[f"decode_vs_{other}{suffix}"] = ratio(times, "decode_rate", other, load)
            rows[f"prefill_vs_{other}{suffix}"] = ratio(times, "prefill_rate", other, load)
        if load is SMALL:
            rows["recompiles"] = sum(p is not programs.get(name) for name, p in ours.engine.programs.items())
    rows |= filters(ours, repeats, console)
    if quick:
        rows |= mixed(QUICK_MIX, ours, rows["ours_decode_tokens_per_s"], console)
    else:
        slots = Ours(one_device(), max_seqs=MIX.slots)
        steady = Load(MIX.slots, MIX.prompt_tokens // 2, MIX.new_tokens // 2)
        slots.engine.prepare(slots.model, MIX.requests())
        times = side_by_side({"ours": slots}, steady, 2)
        rows |= mixed(MIX, slots, times["ours"].decode_rate(steady), console)
    rows |= host_share(Load(256, 16, 4 if quick else 32), console)
    if not quick:
        rows |= multiprocess(console)
    return rows


def mixed(mix: Mix, contestant: Ours, steady: float, console: Console) -> dict[str, float]:
    """Total tokens per second, prompt and new, of mixed requests, next to the steady decode rate of as many slots."""
    requests = mix.requests()
    contestant.engine.prepare(contestant.model, requests)
    start = time.perf_counter()
    completions = contestant.engine.generate(contestant.model, requests)
    seconds = time.perf_counter() - start
    new = sum(len(completion.tokens) for completion in completions)
    total = new + sum(len(request.prompt_tokens) for request in requests)
    console.print(
        f"{mix}: {total / seconds:,.0f} tokens/s in all ({new / seconds:,.0f} new); steady decode {steady:,.0f}"
    )
    return {
        "mixed_vs_steady": total / seconds / steady,
        "mixed_tokens_per_s": total / seconds,
        "mixed_new_tokens_per_s": new / seconds,
    }


def filters(ours: Ours, repeats: int, console: Console) -> dict[str, float]:
    """Decode tokens per second with top-k and top-p over those of plain sampling at the same temperature.

    Logits of random weights are nearly equal, so top-p alone keeps most of the vocabulary, which no model that has
    learnt something does: the search over all tokens at every step, in a figure of its own.
    """
    plain = {"temperature": 1.0}
    contestants: dict[str, Contestant] = {
        "plain": Drawn(ours, plain),
        "filtered": Drawn(ours, plain | {"top_k": 50, "top_p": 0.95}),
        "searched": Drawn(ours, plain | {"top_p": 0.95}),
    }
    times = side_by_side(contestants, SMALL, repeats)
    rates = {name: each.decode_rate(SMALL) for name, each in times.items()}
    console.print(
        f"{SMALL}, drawn: {rates['plain']:,.0f} tokens/s, with top-k 50 and top-p 0.95 {rates['filtered']:,.0f}, with "
        f"top-p alone {rates['searched']:,.0f}"
    )
    return {
        "filters_vs_plain": rates["filtered"] / rates["plain"],
        "filters_search_vs_plain": rates["searched"] / rates["plain"],
        "plain_sampling_tokens_per_s": rates["plain"],
    }


def host_share(load: Load, console: Console) -> dict[str, float]:
    """Host time between launches, as a share of the launches."""
    contestant = Ours(one_device())
    requests = load.requests()
    contestant.engine.prepare(contestant.model, requests)
    contestant.generate(load, 1)
    inside = 0.0

    class Timed(Gate):
        @contextlib.contextmanager
        def launch(self, program: str) -> Iterator[None]:
            nonlocal inside
            start = time.perf_counter()
            yield
            inside += time.perf_counter() - start

    start = time.perf_counter()
    for _ in contestant.engine.stream(contestant.model, requests, gate=Timed()):
        pass
    outside = time.perf_counter() - start - inside
    console.print(
        f"{load.prompts} sequences: {inside:.2f} s in launches, {outside * 1e3:.1f} ms on the host between them"
    )
    return {"host_share": outside / inside}


def multiprocess(console: Console) -> dict[str, float | None]:
    """Decode on 2 processes × 2 devices with FSDP-trained weights, ours over Levanter's."""
    rates: dict[str, float] = {}
    for name in ("ours", "levanter") if installed("levanter") else ("ours",):
        (rates[name],) = run_workers("benchmarks.decode", "--worker", name, processes=2, devices=2)
        console.print(f"2 processes × 2 devices: {name}: decode {rates[name]:,.0f} tokens/s")
    if "levanter" not in rates:
        return {"multiprocess_vs_levanter": None, "multiprocess_ours_tokens_per_s": rates["ours"]}
    return {
        "multiprocess_vs_levanter": rates["ours"] / rates["levanter"],
        "multiprocess_ours_tokens_per_s": rates["ours"],
        "multiprocess_levanter_tokens_per_s": rates["levanter"],
    }


def worker(name: str) -> int:
    """One process of the multi-process row: measures one contestant on all devices."""
    from lockstep.hosts import run_main, start
    from lockstep.placement import make_mesh

    def run() -> None:
        hosts = start()
        mesh = make_mesh("auto")
        contestant = Ours(mesh) if name == "ours" else Levanter(SMALL, mesh)
        times = side_by_side({name: contestant}, SMALL, 2 if name == "ours" else 1)
        if hosts.is_leader:
            report(times[name].decode_rate(SMALL))

    run_main(run)
    return 0


def show(rows: Mapping[str, Any], goals: Mapping[str, tuple[str, float]]) -> None:
    """The rows of a goal table."""
    table = Table(title="engine benchmark (ratios of one run)", title_justify="left")
    for column in ("row", "measured", "goal", ""):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for name, (sign, goal) in goals.items():
        value = rows[name]
        if value is None:
            table.add_row(name, "–", f"{sign} {goal}", "not measured")
            continue
        met = value >= goal if sign == ">=" else value <= goal
        table.add_row(name, f"{value:.3g}", f"{sign} {goal}", "met" if met else "[bold]not met[/bold]")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
