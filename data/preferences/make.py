"""Writes the preference pairs of config/simpo_tiny.yaml beside itself.

Run it as ``python data/preferences/make.py``; the same file comes out every time. Every question is a sum; the chosen
answer says it in English words, the rejected one in digits. The format is that of UltraFeedback-binarized
(https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized): ``prompt``, ``chosen`` and ``rejected``, the
last two as chats. All of the text is made here and dedicated to the public domain (CC0-1.0).
"""

import argparse
import json
import random
from pathlib import Path

SEED = 7
PAIRS = 400

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


def pair(first: int, second: int) -> dict[str, object]:
    """One question with an answer that is liked and one that is not."""
    question = f"What is {first} plus {second}?"

    def chat(answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    return {"prompt": question, "chosen": chat(words(first + second)), "rejected": chat(str(first + second))}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory to write to")
    output = parser.parse_args().output
    draw = random.Random(SEED)
    sums = draw.sample([(a, b) for a in range(1, 50) for b in range(1, 50)], PAIRS)
    lines = [json.dumps(pair(a, b)) + "\n" for a, b in sums]
    (output / "sums.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
