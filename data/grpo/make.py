"""Writes the questions of config/grpo_demo.yaml beside itself.

Run it as ``python data/grpo/make.py``; the same files come out every time. ``sums.jsonl``: sums that the demo trains on
(`lockstep.main.demo`), in the format of GSM8K (https://huggingface.co/datasets/openai/gsm8k), ``question``, and
``answer`` with the final answer after ``####``. ``held_out.jsonl``: the sums that the demo never trains on, as prompts.
All of the text is made here and dedicated to the public domain (CC0-1.0, see LICENSE in this directory).
"""

import argparse
import json
import re
from pathlib import Path

from lockstep.main.demo import split

QUESTIONS = 64


def sums() -> list[dict[str, str]]:
    """Sums that the demo trains on, with a worked answer each."""
    train, _ = split()
    found = []
    for row in train:
        if "plus" in row["prompt"]:
            first, second = re.findall(r"\d+", row["prompt"])
            answer = row["completion"].strip()
            found.append({"question": row["prompt"], "answer": f"{first} and {second} make {answer}.\n#### {answer}"})
    return found[:QUESTIONS]


def held_out() -> list[dict[str, str]]:
    """Sums that the demo does not train on."""
    _, prompts = split()
    return [row for row in prompts if "plus" in row["prompt"]]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory to write to")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sums", sums()), ("held_out", held_out())):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
