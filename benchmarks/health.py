"""The price of the health of an answer, on one core, and the false alarms of runs without a fault, simulated.

    python -m benchmarks.health [--json PATH]

Answers have 1,000 tokens, a word or a sign each: prose, code, tables, Chinese, loops that begin anywhere, and markers.
``ms_per_answer`` is the mean over the answers; each counts with the least of several times. ``false_alarms_per_round``
is the mean over the kinds and sizes of runs of benchmarks/false_alarms.py.
"""

import argparse
import math
import random
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.false_alarms import KINDS, SIZES
from benchmarks.false_alarms import false_alarms_per_round as rate
from benchmarks.sizes import sized
from benchmarks.workers import write_json
from lockstep.health import AnsweredPrompt, Vocabulary, measure_round
from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason

ROOT = Path(__file__).parents[1]
TOKENS, ANSWERS, ROUNDS = 1_000, sized(64, 8), sized(5, 1)
RUNS, RUN_ROUNDS = sized(2, 1), sized(200, 4)  # simulated runs of each kind and size, and the rounds of each
SOURCES = ("docs/protocol.md", "docs/training.md", "docs/plan.md", "README.md", "src/lockstep/training/run/run.py")
PIECE = re.compile(r"\s?[^\W\u3040-\u9fff]+|\s|[\u3040-\u9fff]|[^\w\s]")


def texts(rng: random.Random) -> Iterator[str]:
    """Texts of 1,000 tokens or more."""
    pages = [(ROOT / source).read_text(encoding="utf-8") for source in SOURCES]
    while True:
        page = rng.choice(pages)
        text = page[rng.randrange(max(1, len(page) - 12_000)) :]
        yield text
        yield (
            text[: rng.randrange(4_000)] + rng.choice(("!", " ba", "I do not know. ", "東京は日本の首都です。")) * 1_000
        )
        yield "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(1_000))
        yield f"<think>{text[:500]}</think><|im_start|>{text}"


def answers(seed: int = 0) -> list[AnsweredPrompt]:
    """The answers of a round."""
    rng = random.Random(seed)
    context = (ROOT / SOURCES[0]).read_text(encoding="utf-8")[:2_000]
    made = []
    for number, text in zip(range(ANSWERS), texts(rng), strict=False):
        pieces = PIECE.findall(text)[:TOKENS]
        assert len(pieces) == TOKENS, "a text is too short"
        question = f"Question {number}: what does this say? {context}"
        completion = Completion(
            prompt_id=number,
            generation_id=0,
            tokens=token_ids(pieces),
            logprobs=(-1.0,) * TOKENS,
            finish_reason=FinishReason.LENGTH,
        )
        made.append(
            AnsweredPrompt(
                prompt=Prompt(id=number, text=question),
                completion=completion,
                text="".join(pieces),
                prompt_tokens=token_ids(PIECE.findall(question)),
            )
        )
    return made


def token_ids(pieces: Sequence[str]) -> tuple[int, ...]:
    """An id of a vocabulary as large as that of Llama 3 for each piece."""
    return tuple(zlib.crc32(piece.encode()) % 128_256 for piece in pieces)


def ms_per_answer() -> float:
    """Milliseconds of an answer of 1,000 tokens."""
    every = answers()
    vocabulary = Vocabulary(special=frozenset(range(128_256, 128_512)), ends=frozenset({128_001}))
    best = [math.inf] * len(every)
    for _ in range(ROUNDS):
        for place, answer in enumerate(every):
            start = time.perf_counter()
            measure_round([answer], vocabulary)
            best[place] = min(best[place], time.perf_counter() - start)
    return 1e3 * fmean(best)


def main() -> None:
    """Measure, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rates = {
        f"false_alarms_per_round/{kind}/{prompts}x{answers}": rate(kind, prompts, answers, runs=RUNS, rounds=RUN_ROUNDS)
        for kind in KINDS
        for prompts, answers in SIZES
    }
    rows = {"ms_per_answer": ms_per_answer(), "false_alarms_per_round": fmean(rates.values()), **rates}
    print("\n".join(f"{name}: {value:.3g}" for name, value in rows.items()))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
