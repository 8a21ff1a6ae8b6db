"""The ``lockstep`` command."""

import importlib
import sys
from collections.abc import Sequence
from typing import Final

from lockstep.errors import ConfigError

COMMANDS: Final = {
    "train-lm": ("lockstep.main.train_lm", "train a language model on text, completions or chats"),
    "train-simpo": ("lockstep.main.train_simpo", "train on preference pairs with SimPO"),
    "sample": ("lockstep.main.sample", "answer prompts from a checkpoint, every prompt exactly once"),
    "plan": ("lockstep.main.plan", "compile a configuration for a TPU slice without a TPU: does it fit, how fast"),
    "train-grpo": ("lockstep.main.train_grpo", "GRPO; cannot train yet, lockstep plan reads its configurations"),
}
"""Command to (module with ``main(arguments) -> exit code``, what it does)."""


def usage() -> str:
    """The text of ``lockstep --help``."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return (
        "usage: lockstep COMMAND --config_path FILE.yaml [--key.in.dots VALUE ...]\n\n"
        "See what your model says while it trains on a TPU pod.\n\n"
        f"commands:\n{commands}\n\n"
        "lockstep COMMAND --help lists a command's keys. Start it on every host; several processes on one machine:\n"
        "  python infra/launch.py --backend local --processes 2 --devices_per_process 2 -- lockstep COMMAND ..."
    )


def run(arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
        arguments: of the command line, without the program's name.

    Returns:
        Exit code.

    Raises:
        ConfigError: there is no such command.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}. Known commands: {', '.join(COMMANDS)}. See lockstep --help.")
    return int(importlib.import_module(COMMANDS[name][0]).main(rest))


def main() -> None:
    """Entry point: run the command of this process's arguments and leave the job in order.

    Raises:
        SystemExit: with the exit code of a failure.
    """
    from lockstep.hosts import run_main

    run_main(lambda: run(sys.argv[1:]))
