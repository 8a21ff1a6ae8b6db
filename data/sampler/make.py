"""Writes the prompts of the sampler's configurations: chats in a fixed order, the same bytes every time."""

import itertools
import json
from pathlib import Path

HERE = Path(__file__).parent
TOPICS = (
    "how a refrigerator moves heat",
    "why the sky is blue at noon and red in the evening",
    "what an interest rate does to a mortgage",
    "how vaccines prepare the immune system",
    "what a hash table is and when it is slow",
    "why bread dough rises",
    "how a sailing boat can go against the wind",
    "what makes a good scientific experiment",
    "how elections by ranked choice are counted",
    "why leap years exist",
    "what a neural network learns during training",
    "how a violin makes its sound",
    "why metals conduct electricity",
    "how the tides depend on the moon",
    "what a good apology consists of",
    "how to prove that there are infinitely many primes",
)
TASKS = (
    "Explain {} to a curious twelve-year-old.",
    "Write a short dialogue between a teacher and a student about {}.",
    "List five common misunderstandings about {} and correct each of them.",
    "Write a quiz of six questions with answers about {}.",
    "Summarise {} in exactly three sentences.",
    "Write the outline of a one-hour lesson on {}.",
    "Tell a short story in which someone finds out {}.",
    "Compare two ways of explaining {} and say which one you prefer.",
)


def prompts() -> list[dict[str, object]]:
    """128 chats of one message each."""
    pairs = itertools.product(TASKS, TOPICS)
    return [{"messages": [{"role": "user", "content": task.format(topic)}]} for task, topic in pairs]


def main() -> None:
    """Write both files."""
    for count in (100, 128):
        lines = [json.dumps(prompt) + "\n" for prompt in prompts()[:count]]
        (HERE / f"prompts_{count}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
