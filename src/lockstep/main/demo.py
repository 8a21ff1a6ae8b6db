"""``lockstep demo``: a small model learns to spell numbers on this machine, and what it says is shown as it does."""

import argparse
import importlib.resources
import json
import shlex
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lockstep import exits
from lockstep.launch import main as launch
from lockstep.main.commands import find_command
from lockstep.main.demo_data import split, write_rows, write_tokenizer
from lockstep.main.reader_arguments import Arguments
from lockstep.report import read_jsonl

KIND: Final = "in words"
"""What the questions of the demo have in common: numbers to spell, which a model learns faster than sums."""
PROMPTS: Final = 8
"""The number of questions that the model answers while it learns."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given.

    Args:
        parser: Where to add it.
    """
    parser.add_argument("--steps", type=int, metavar="N", help="train steps (default: as demo.yaml says, 100)")
    parser.add_argument(
        "--processes", type=int, choices=(1, 2, 4), default=2, help="processes, with one device each (default: 2)"
    )
    parser.add_argument(
        "--directory", default="lockstep-demo", metavar="PATH", help="where everything goes (default: lockstep-demo)"
    )


def main(arguments: Sequence[str]) -> int:
    """Write what is missing, train, and say what to do next.

    Args:
        arguments: The command line after ``lockstep demo``.

    Returns:
        The exit code of the run.

    Raises:
        LockstepError: An argument is wrong.
    """
    parser = Arguments("demo", find_command("demo").description)
    add_options(parser)
    options = parser.parse_args(list(arguments))
    if options.help:
        print(parser.format_help())
        return exits.DONE
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    directory = Path(options.directory)
    words = [*_job(options.processes), *_training(directory)]
    written = write_demo(directory, shlex.join(["lockstep", "launch", *words]))
    print(_introduction(directory, options.processes, written), flush=True)
    run_id = time.strftime("%Y%m%d-%H%M%S")
    words += ["--trainer.log_dir", str(directory / "runs"), "--trainer.run_id", run_id]
    if options.steps is not None:
        words += ["--trainer.num_train_steps", str(options.steps)]
    code = launch(words)
    if code == exits.DONE:
        print(closing(directory / "runs" / run_id), flush=True)
    return code


def _job(processes: int) -> list[str]:
    return ["--backend", "local", "--processes", str(processes), "--devices_per_process", "1"]


def _training(directory: Path) -> list[str]:
    return ["--", "lockstep", "train-lm", "--config_path", str(directory / "demo.yaml")]


def write_demo(directory: Path, command: str) -> bool:
    """Write configuration and data of the demo, unless they are there.

    Args:
        directory: Where to write.
        command: The command line that trains with them.

    Returns:
        Whether they were written.
    """
    config = directory / "demo.yaml"
    if config.exists():
        return False
    train, held_out = ([row for row in kind if KIND in row["prompt"]] for kind in split())
    files = {"train": directory / "train.jsonl", "prompts": directory / "prompts.jsonl"}
    tokenizer = directory / "tokenizer"
    write_tokenizer(train, tokenizer)
    write_rows(train, files["train"])
    write_rows(held_out[:PROMPTS], files["prompts"])
    text = (importlib.resources.files("lockstep.main") / "demo.yaml").read_text(encoding="utf-8")
    paths = {name: json.dumps(str(path)) for name, path in {**files, "tokenizer": tokenizer}.items()}
    config.write_text(string.Template(text).substitute(paths, command=command), encoding="utf-8")
    return True


def _introduction(directory: Path, processes: int, written: bool) -> str:
    where = "one process" if processes == 1 else f"{processes} processes, as on a pod of {processes} hosts"
    found = "are written to" if written else "are already in"
    return (
        f"demo: a small Llama learns to spell numbers, on {where}. Every 20 steps\n"
        "demo: it answers questions that it is never trained on. What it says first is noise; ctrl-C ends it.\n"
        f"demo: configuration and data {found} {directory}\n"
    )


def closing(run_dir: Path) -> str:
    """What the model has learnt, and what to do next.

    Args:
        run_dir: The directory of the run.

    Returns:
        A text of several lines.
    """
    rows = read_jsonl(run_dir / "samples.jsonl")
    right = {step: [row["exact_match"] for row in rows if row["step"] == step] for step in (0, rows[-1]["step"])}
    (_, before), (last, after) = right.items()
    directory, checkpoint = run_dir.parents[1], shlex.quote(str(run_dir / "checkpoint"))
    ask = "--max_new_tokens 12 --prompts '[\"What is 4321 in words?\"]'"
    next_steps = {
        "see every answer at every step, in a browser": f"lockstep report {shlex.quote(str(run_dir))}",
        "ask it something": f"lockstep sample --hf_checkpoint {checkpoint} {ask}",
        f"change {directory / 'demo.yaml'} (longer, another shape, your own data), and run it again": shlex.join(
            ["lockstep", "demo", "--directory", str(directory)]
        ),
        "see how such a run does on a TPU slice that you do not have yet": "lockstep plan --help",
        "see all commands": "lockstep --help",
    }
    return "\n".join(
        [
            "",
            f"demo: {sum(before):.0f} of {len(before)} answers were right before the first step, {sum(after):.0f} of "
            f"{len(after)} after step {last}.",
            "demo: in a training loop of your own this is lockstep.SampleCallback(config, tokenizer), after each step.",
            "next:",
            *(f"  {what}:\n    {command}" for what, command in next_steps.items()),
        ]
    )
