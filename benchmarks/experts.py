"""How fast a mixture of experts decodes and trains, next to its peers and to the floor.

    python -m benchmarks.experts [--quick] [--only PART] [--json PATH]

Rows are ratios measured side by side in one run; compile time is apart. The floor is the bytes and products that are
needed: the matrix products of attention, router and output layer, and of the experts that even routing hits
(`benchmarks.contestants.Floor`). transformers needs torch, the train step Levanter; without, and with ``--only``, their
rows are null. Training is that of `benchmarks.train_step` with ``--experts``.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from benchmarks import train_step
from benchmarks.contestants import (
    Contestant,
    Floor,
    Ours,
    Transformers,
    installed,
    keep_freed_memory,
    one_device,
    ratio,
    side_by_side,
)
from benchmarks.decode import show
from benchmarks.shapes import EXPERTS, Load
from benchmarks.workers import report, run_workers, write_json

LOAD, QUICK = Load(8, 64, 64), Load(8, 64, 16)
GOALS = {
    "decode_vs_floor": (">=", 0.75),
    "prefill_vs_floor": (">=", 0.75),
    "decode_vs_transformers": (">=", 2.0),
    "tokens_vs_levanter": (">=", 1.0),
}
PARTS = ("engine", "train", "multiprocess")


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter answers and fewer turns")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part; again for more")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    load = QUICK if options.quick else LOAD
    if options.worker:
        return worker(load)
    console = Console(stderr=True)
    keep_freed_memory()
    rows: dict[str, Any] = dict.fromkeys((*GOALS, "multiprocess_vs_floor"))
    rows["load_average_before"] = os.getloadavg()[0]
    parts = options.only or PARTS
    if "engine" in parts:
        rows |= engine(load, 3 if options.quick else 7, console)
    if "multiprocess" in parts:
        rows |= multiprocess(options.quick, console)
    if "train" in parts and installed("levanter"):
        rows |= training(options.quick)
    rows["load_average_after"] = os.getloadavg()[0]
    show(rows, GOALS)
    if options.json:
        write_json(options.json, rows)
    return 0


def engine(load: Load, repeats: int, console: Console) -> dict[str, Any]:
    """Prefill and decode on one device."""
    ours = Ours(one_device(), EXPERTS)
    contestants: dict[str, Contestant] = {"floor": Floor(EXPERTS), "ours": ours}
    rows = {"ours_first_call_s": ours.generate(load, load.new_tokens)}
    if installed("torch", "transformers"):
        contestants["transformers"] = Transformers(EXPERTS)
    times = side_by_side(contestants, load, repeats, peers_every=2, warm=("ours",))
    for name, each in times.items():
        rows[f"{name}_decode_tokens_per_s"] = each.decode_rate(load)
        rows[f"{name}_prefill_tokens_per_s"] = each.prefill_rate(load)
        console.print(
            f"{load}: {name}: decode {each.decode_rate(load):,.0f} tokens/s, "
            f"prefill {each.prefill_rate(load):,.0f} tokens/s"
        )
    for other in ("floor", "transformers"):
        rows[f"decode_vs_{other}"] = ratio(times, "decode_rate", other, load)
        rows[f"prefill_vs_{other}"] = ratio(times, "prefill_rate", other, load)
    return rows


def training(quick: bool) -> dict[str, Any]:
    """The train step over Levanter's for the same model, each in processes of its own."""
    options = argparse.Namespace(turns=1 if quick else 2, steps=8, layers=4, experts=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        return train_step.measure(options, train_step.PLACES[:1], Path(name))


def multiprocess(quick: bool, console: Console) -> dict[str, float]:
    """Decode on 2 processes × 2 devices with FSDP-trained weights, over the floor on one device of one of them."""
    arguments = ["--worker", *(["--quick"] if quick else [])]
    ((ours, floor),) = run_workers("benchmarks.experts", *arguments, processes=2, devices=2)
    console.print(f"2 processes × 2 devices: decode {ours:,.0f} tokens/s, floor {floor:,.0f}")
    return {
        "multiprocess_vs_floor": ours / floor,
        "multiprocess_ours_tokens_per_s": ours,
        "multiprocess_floor_tokens_per_s": floor,
    }


@dataclasses.dataclass
class OnLeader:
    """A contestant that runs on the leader while the other processes wait."""

    hosts: Any
    contestant: Contestant | None

    def generate(self, load: Load, new_tokens: int) -> float:
        """Seconds of the leader's call; 0 elsewhere."""
        seconds = 0.0 if self.contestant is None else self.contestant.generate(load, new_tokens)
        self.hosts.barrier("floor")
        return seconds


def worker(load: Load) -> int:
    """One process of the multi-process row."""
    from lockstep.hosts import run_main, start
    from lockstep.placement import make_mesh

    def run() -> None:
        hosts = start()
        floor = OnLeader(hosts, Floor(EXPERTS) if hosts.is_leader else None)
        times = side_by_side({"floor": floor, "ours": Ours(make_mesh("auto"), EXPERTS)}, load, 3)
        if hosts.is_leader:
            report([times[name].decode_rate(load) for name in ("ours", "floor")])

    run_main(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
