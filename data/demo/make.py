"""Writes the demo's data beside itself: training text, held-out prompts and the tokenizer.

Run it as ``python data/demo/make.py``; the same files come out every time. What is in them, `lockstep.main.demo`
says: all of the text is made there and dedicated to the public domain (CC0-1.0, see LICENSE in this directory).
"""

import argparse
from pathlib import Path

from lockstep.main.demo import split, write_rows, write_tokenizer


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory to write to")
    output = parser.parse_args().output
    train, held_out = split()
    output.mkdir(parents=True, exist_ok=True)
    write_rows(train, output / "train.jsonl")
    write_rows(held_out, output / "prompts.jsonl")
    write_tokenizer(train, output / "tokenizer")


if __name__ == "__main__":
    main()
