"""Writes preference pairs beside itself: sums.jsonl, as_asked.jsonl and as_asked_held_out.jsonl.

Run it as ``python data/preferences/make.py``; the same files come out every time. Every question is a sum. In
``sums.jsonl`` (config/simpo_tiny.yaml) the chosen answer is always in English words and the rejected one in digits. In
``as_asked`` the question says which of the two it wants, and each sum is there twice, once for words and once for
digits: a model that does not read what is asked is right in exactly half of them, whatever else it has learned. The
sums that are held out are not in ``as_asked.jsonl`` in either order. The format is that of UltraFeedback-binarized
(https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized): ``prompt``, ``chosen`` and ``rejected``, the
last two as chats. All of the text is made here and dedicated to the public domain (CC0-1.0).
"""

import argparse
import json
import random
from pathlib import Path

SEED = 7
PAIRS = 400
AS_ASKED_SUMS, HELD_OUT_SUMS = 300, 100

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(number: int) -> str:
    """English words of a number below 100."""
    if number < 20:
        return UNITS[number]
    return TENS[number // 10] + ("-" + UNITS[number % 10] if number % 10 else "")


def pair(question: str, liked: str, other: str) -> dict[str, object]:
    """One question with an answer that is liked and one that is not."""

    def chat(answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    return {"prompt": question, "chosen": chat(liked), "rejected": chat(other)}


def in_words(first: int, second: int) -> dict[str, object]:
    """A sum whose answer is always to be in words."""
    return pair(f"What is {first} plus {second}?", words(first + second), str(first + second))


def as_asked(first: int, second: int) -> list[dict[str, object]]:
    """A sum asked for in words and asked for in digits, with the same two answers."""
    question, spelled, digits = f"What is {first} plus {second} in", words(first + second), str(first + second)
    return [pair(f"{question} words?", spelled, digits), pair(f"{question} digits?", digits, spelled)]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory to write to")
    output = parser.parse_args().output
    draw = random.Random(SEED)
    sums = draw.sample([(a, b) for a in range(1, 50) for b in range(1, 50)], PAIRS)
    unordered = [(a, b) for a in range(1, 50) for b in range(a, 50)]
    drawn = [draw.sample(two, 2) for two in draw.sample(unordered, AS_ASKED_SUMS + HELD_OUT_SUMS)]
    files = {
        "sums": [in_words(a, b) for a, b in sums],
        "as_asked": [one for a, b in drawn[:AS_ASKED_SUMS] for one in as_asked(a, b)],
        "as_asked_held_out": [one for a, b in drawn[AS_ASKED_SUMS:] for one in as_asked(a, b)],
    }
    for name, pairs in files.items():
        lines = [json.dumps(one) + "\n" for one in pairs]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
