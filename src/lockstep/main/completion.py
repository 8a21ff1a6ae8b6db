"""``lockstep completion``: what a shell needs to complete commands and keys with the Tab key."""

import argparse
from collections.abc import Sequence
from typing import Final

import shtab

from lockstep.errors import ConfigError
from lockstep.main.arguments import CONFIG_PATH
from lockstep.main.commands import COMMANDS
from lockstep.main.help import add_keys

SHELLS: Final = ("bash", "zsh", "fish")


def main(arguments: Sequence[str]) -> int:
    """Print the completion script of a shell.

    Args:
        arguments: The command line after ``lockstep completion``: the name of the shell.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no such shell.
    """
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        given = " ".join(arguments) or "nothing"
        raise ConfigError(f"lockstep completion was given {given}; it takes one of {', '.join(SHELLS)}.")
    print(script(arguments[0]))
    return 0


def script(shell: str) -> str:
    """The completion script of a shell: text alone, so that the Tab key starts no Python.

    Args:
        shell: The name of the shell, one of `SHELLS`.
    """
    parser = argparse.ArgumentParser(prog="lockstep", description="See what your model says while it trains.")
    commands = parser.add_subparsers(dest="command")
    for command in COMMANDS:
        # A key that two blocks of a launcher share is one word to a shell.
        each = commands.add_parser(command.name, help=command.summary, add_help=False, conflict_handler="resolve")
        add_keys(each, command)
        for action in each._actions:
            if f"--{CONFIG_PATH}" in action.option_strings:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    text: str = shtab.complete(parser, shell)
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given, for ``--help``.

    Args:
        parser: Where to add it.
    """
    parser.add_argument("shell", choices=SHELLS, help="whose completion script to print")
