"""Writes questions as the prompts that ``train-grpo`` makes of them, for ``lockstep sample`` and ``inference_eval``.

The system's message, the instruction and the format are those of a run's configuration, so that held-out questions are
asked as those that are trained on. Run it in the repository's environment, for example for the test split of GSM8K::

    .venv/bin/python scripts/make_grpo_prompts.py --config_path config/grpo_gsm8k_qwen25_3b_v6e_8.yaml \
        test.jsonl gsm8k_test_prompts.jsonl
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.main.arguments import parse_arguments
from lockstep.training import TrainGrpoConfig
from lockstep.training.rl import iter_questions


def prompts(config: TrainGrpoConfig, questions: str) -> Iterator[dict[str, Any]]:
    """Every question of a file, with its reference answer."""
    for _, prompt in iter_questions(dataclasses.replace(config.data, train_urls=(questions,))):
        asked = {"prompt": prompt.text} if prompt.messages is None else {"messages": list(prompt.messages)}
        yield {**prompt.fields, **asked, "answer": prompt.answer}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config_path", type=Path, required=True, help="configuration of train-grpo")
    parser.add_argument("questions", help="JSON lines with question and answer, as in GSM8K: a file or a URL")
    parser.add_argument("output", type=Path, help="the file to write")
    options = parser.parse_args()
    config = parse_arguments(TrainGrpoConfig, ["--config_path", str(options.config_path)])
    lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in prompts(config, options.questions)]
    options.output.write_text("".join(lines), encoding="utf-8")
    print(f"wrote {options.output}: {len(lines):,} prompts")


if __name__ == "__main__":
    main()
