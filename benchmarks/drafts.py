"""What drafts are worth: tokens per second with drafts of which 0, 50, 90 and 100 % of the tokens are right, over none.

    python -m benchmarks.drafts [--quick] [--batch 8|2|1] [--json PATH]

All in one run and in turns, on the same weights, greedy; 8 sequences, then 2 and 1. A draft is the answer itself, with
tokens replaced at random places: so after a wrong token the next ones may be right. Times begin when prefill is done.
The engine chooses by itself how much of a draft it verifies at a time. As in a run from the
third round on, it knows how many tokens of the last two answers to a prompt were the same, here the share; ``told
nothing`` is the second round, where drafts prove themselves first.

``uneven`` has right drafts for all sequences but one, whose draft is all wrong: a round lasts as long as that one.

The ceiling is what the matrix products of the weights leave, measured alone in the same run: the most tokens per second
of any number of positions at a time, over those of plain decode. Where a step of one token per sequence is bound by its
products already, it is near 1, whoever verifies.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Floor, one_device
from benchmarks.shapes import MODEL, VOCAB, Load, random_weights
from benchmarks.workers import write_json
from lockstep.engine import Engine, EngineConfig, Gate, Observer
from lockstep.engine.schedule import Counts, Scheduler
from lockstep.types import Completion, Drafts, Request

SHARES = (0, 50, 90, 100)
GOALS = {"0": 0.95, "50": 0.95, "90": 3.0, "100": 6.0, "uneven": 0.95}
"""The least that drafts of each share of right tokens should gain where steps are bound by memory."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Positions of a sequence whose products are measured alone, for the ceiling."""
BATCHES = (8, 2, 1)


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="answers of 64 tokens, one turn")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="this batch only; may be repeated")
    parser.add_argument("--json", type=Path, help="write one key per row to this file")
    arguments = parser.parse_args()
    console, rows = Console(stderr=True), dict[str, Any]()
    for batch in arguments.batch or BATCHES:
        load = Load(batch, 64, 64 if arguments.quick else 256)
        found = measure(load, 1 if arguments.quick else 3, console)
        show(batch, found)
        rows |= {name if batch == BATCHES[0] else f"{name}_batch_{batch}": value for name, value in found.items()}
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def measure(load: Load, turns: int, console: Console) -> dict[str, Any]:
    """All rows of a batch; keys beyond the table's are further figures.

    Args:
        load: what to generate.
        turns: how often each contestant is measured.
        console: where progress is told.
    """
    engine, model = Engine(EngineConfig(), one_device()), (MODEL, random_weights(one_device()))
    plain = load.requests()
    nothing = [dataclasses.replace(each, drafts=Drafts()) for each in plain]  # compiles what verifies, too
    engine.prepare(model, nothing)
    _, answers, _ = timed(engine, model, plain)
    contestants = {"plain": plain}
    for share in SHARES:
        contestants[f"{share}"] = drafted(plain, answers, share / 100)
        contestants[f"{share}_told_nothing"] = drafted(plain, answers, share / 100, told=False)
    wrong, *right = drafted(plain[:1], answers[:1], 0.0) + drafted(plain[1:], answers[1:], 1.0)
    if right:
        contestants["uneven"] = [wrong, *right]
    seconds, counts = {name: list[float]() for name in contestants}, dict[str, Counts]()
    floor, products = Floor(), dict[int, float]()
    for turn in range(turns + 1):
        for name, requests in contestants.items():
            elapsed, got, counts[name] = timed(engine, model, requests)
            assert [c.tokens for c in got] == [c.tokens for c in answers], f"drafts change tokens: {name}"
            if turn:  # the first turn is to warm up
                seconds[name].append(elapsed)
        for width in WIDTHS:
            products[width] = min(products.get(width, np.inf), floor.step_s(load.prompts * width, 2))
        console.print(f"{load.prompts} sequences, turn {turn} of {turns}")
    return figures(load, seconds, counts, products)


def drafted(
    requests: Sequence[Request], answers: Sequence[Completion], share: float, *, told: bool = True
) -> list[Request]:
    """The requests with their answers as drafts, of which each token is right with the given probability.

    Args:
        requests: one generation each.
        answers: in the order of the requests.
        share: the probability.
        told: whether the request says how many tokens of the last two answers were the same.
    """
    rng = np.random.default_rng(2)

    def drafts(tokens: Sequence[int]) -> Drafts:
        wrong = rng.random(len(tokens)) >= share
        draft = tuple(np.where(wrong, (np.array(tokens) + 1) % VOCAB, tokens).tolist())
        if not told:
            return Drafts(answers=(draft,))
        return Drafts(answers=(draft,), compared=len(tokens), right=int((~wrong).sum()))

    return [
        dataclasses.replace(request, drafts=drafts(answer.tokens))
        for request, answer in zip(requests, answers, strict=True)
    ]


def timed(engine: Engine, model: Any, requests: Sequence[Request]) -> tuple[float, list[Completion], Counts]:
    """Seconds of a run from the end of prefill to the last answer, the answers, and what the scheduler counted."""
    start, counts = 0.0, Counts(finished=0, tokens=(), pages=0, max_pages=0)

    class Noted(Observer):
        def between_launches(self, scheduler: Scheduler) -> None:
            nonlocal start, counts
            counts = scheduler.counts
            if not sum(counts.tokens):
                jax.block_until_ready(jax.live_arrays())  # prefill writes its pages while the host goes on
                start = time.perf_counter()

    answers = [each for part in engine.stream(model, requests, gate=Gate(observer=Noted())) for each in part]
    seconds = time.perf_counter() - start
    return seconds, sorted(answers, key=lambda each: each.prompt_id), counts


def figures(
    load: Load,
    seconds: Mapping[str, Sequence[float]],
    counts: Mapping[str, Counts],
    products: Mapping[int, float],
) -> dict[str, Any]:
    """The rows of what was measured.

    Args:
        load: What was generated.
        seconds: The seconds of each turn after prefill, by contestant; ``plain`` among them.
        counts: What the scheduler counted, by contestant.
        products: The seconds of the products of a step, by the positions of each sequence in it.
    """
    tokens, plain, rows = load.prompts * load.new_tokens, np.array(seconds["plain"]), dict[str, Any]()
    for name, each in seconds.items():
        if name != "plain":  # of each turn for itself: the machine is not equally fast in all of them
            rows[f"speedup_{name}"] = float(np.median(plain / np.array(each)))
    for share in SHARES:
        rates = [load.prompts * expected(share / 100, width) / products[width] for width in WIDTHS]
        rows[f"ceiling_{share}"] = max(rates) / (tokens / float(np.min(plain)))
        rows[f"of_ceiling_{share}"] = rows[f"speedup_{share}"] / rows[f"ceiling_{share}"]
    for name, each in seconds.items():
        rows[f"tokens_per_s_{name}"] = tokens / float(np.median(each))
        rows[f"tokens_per_step_{name}"] = sum(counts[name].tokens) / counts[name].steps
    return rows | {f"products_ms_{width}": products[width] * 1e3 for width in WIDTHS}


def expected(share: float, width: int) -> float:
    """The tokens that a step of ``width`` positions samples of a sequence, where each is right with a probability."""
    return float(sum(share**position for position in range(width)))


def show(batch: int, rows: Mapping[str, Any]) -> None:
    """Print the table of a batch."""
    columns = ("right tokens", "tokens/s", "tokens per step", "over plain decode", "goal", "told nothing", "ceiling")
    table = Table(*columns, title=f"drafts, {batch} sequences")
    for name, goal in GOALS.items():
        if f"speedup_{name}" not in rows:
            continue
        told_nothing, ceiling = rows.get(f"speedup_{name}_told_nothing"), rows.get(f"ceiling_{name}")
        table.add_row(
            name if name == "uneven" else f"{name} %",
            f"{rows[f'tokens_per_s_{name}']:,.0f}",
            f"{rows[f'tokens_per_step_{name}']:.2f}",
            f"{rows[f'speedup_{name}']:.2f}",
            f">= {goal:g}",
            "" if told_nothing is None else f"{told_nothing:.2f}",
            "" if ceiling is None else f"{ceiling:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
