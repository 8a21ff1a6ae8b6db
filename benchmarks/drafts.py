"""What drafts are worth: tokens per second with drafts of which 0, 50, 90 and 100 % of the tokens are right, over none.

    python -m benchmarks.drafts [--quick] [--json PATH]

All in one run and in turns, on the same weights, greedy, 8 sequences. A draft is the answer itself, with tokens
replaced at random places: so after a wrong token the next ones may be right. Prefill and the first token are left out
of all times. The engine chooses by itself how much of a draft it verifies at a time.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Times, one_device
from benchmarks.shapes import MODEL, VOCAB, Load, random_weights
from benchmarks.workers import write_json
from lockstep.engine import Engine, EngineConfig
from lockstep.schedule import Counts, Scheduler
from lockstep.types import Completion, Drafts, Request

LOAD, QUICK = Load(8, 64, 256), Load(8, 64, 64)
GOALS = {"speedup_0": 0.95, "speedup_50": None, "speedup_90": 3.0, "speedup_100": 6.0}
"""The least that each key should be, where there is a goal."""


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="answers of 64 tokens, one turn")
    parser.add_argument("--json", type=Path, help="write one key per row to this file")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    rows = measure(QUICK if arguments.quick else LOAD, 1 if arguments.quick else 3, console)
    show(rows)
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def measure(load: Load, turns: int, console: Console) -> dict[str, Any]:
    """All rows; keys beyond the table's are further figures.

    Args:
        load: what to generate.
        turns: how often each contestant is measured.
        console: where progress is told.
    """
    engine, model = Engine(EngineConfig(), one_device()), (MODEL, random_weights(one_device()))
    plain = load.requests()
    nothing = [dataclasses.replace(each, drafts=Drafts()) for each in plain]  # compiles what verifies, too
    engine.prepare(model, nothing)
    answers = engine.run(model, plain)
    contestants = {"plain": plain} | {f"{share}": drafted(plain, answers, share / 100) for share in (0, 50, 90, 100)}
    times, counts = {name: Times() for name in contestants}, dict[str, Counts]()
    for turn in range(turns + 1):
        for name, requests in contestants.items():
            whole, got, counts[name] = timed(engine, model, requests)
            assert [c.tokens for c in got] == [c.tokens for c in answers], f"drafts of {name} % change tokens"
            short = [dataclasses.replace(r, params=dataclasses.replace(r.params, max_new_tokens=1)) for r in requests]
            first = float(np.median([timed(engine, model, short)[0] for _ in range(3)]))
            if turn:  # the first turn is to warm up
                times[name].prefill.append(first)
                times[name].whole.append(whole)
        console.print(f"turn {turn} of {turns}")
    return figures(load, times, counts)


def drafted(requests: Sequence[Request], answers: Sequence[Completion], share: float) -> list[Request]:
    """The requests with their answers as drafts, of which each token is right with the given probability.

    Args:
        requests: one generation each.
        answers: in the order of the requests.
        share: the probability.
    """
    rng = np.random.default_rng(2)

    def draft(tokens: Sequence[int]) -> tuple[int, ...]:
        wrong = rng.random(len(tokens)) >= share
        return tuple(np.where(wrong, (np.array(tokens) + 1) % VOCAB, tokens).tolist())

    return [
        dataclasses.replace(request, drafts=Drafts(answers=(draft(answer.tokens),)))
        for request, answer in zip(requests, answers, strict=True)
    ]


def timed(engine: Engine, model: Any, requests: Sequence[Request]) -> tuple[float, list[Completion], Counts]:
    """Seconds of a run, its answers, and what the scheduler counted."""
    seen: list[Scheduler] = []
    keep: Callable[[Scheduler], None] = seen.append
    start = time.perf_counter()
    answers = engine.run(model, requests, between_launches=keep)
    return time.perf_counter() - start, answers, seen[-1].counts


def figures(load: Load, times: Mapping[str, Times], counts: Mapping[str, Counts]) -> dict[str, Any]:
    """The rows of what was measured.

    Args:
        load: what was generated.
        times: seconds by contestant; ``plain`` among them.
        counts: what the scheduler counted, by contestant.
    """
    rows: dict[str, Any] = {}
    for name, each in times.items():
        if name != "plain":
            rows[f"speedup_{name}"] = each.decode_rate(load) / times["plain"].decode_rate(load)
    for name, each in times.items():
        rows[f"tokens_per_s_{name}"] = each.decode_rate(load)
        rows[f"tokens_per_step_{name}"] = sum(counts[name].tokens) / counts[name].steps
    return rows


def show(rows: Mapping[str, Any]) -> None:
    """Print the table."""
    table = Table(
        "right tokens", "tokens/s", "tokens per step", "over plain decode", "goal", title="drafts, 8 sequences"
    )
    for key, goal in GOALS.items():
        name = key.removeprefix("speedup_")
        table.add_row(
            f"{name} %",
            f"{rows[f'tokens_per_s_{name}']:,.0f}",
            f"{rows[f'tokens_per_step_{name}']:.2f}",
            f"{rows[key]:.2f}",
            "" if goal is None else f">= {goal:g}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
