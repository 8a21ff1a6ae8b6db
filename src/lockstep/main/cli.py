"""The ``lockstep`` command."""

import sys
from collections.abc import Sequence

from lockstep.main.commands import find_command

HELP = ("-h", "--help")
DEBUG = "--debug"
"""What shows the stack of every error, whatever the command."""


def run(arguments: Sequence[str]) -> int:
    """Run a command, or show its help.

    Args:
        arguments: The command line without the program's name and without ``--debug``.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no such command, or its configuration cannot work.
    """
    if not arguments or arguments[0] in HELP:
        from lockstep.main.help import overview

        print(overview())
        return 0 if arguments else 2
    command, rest = find_command(arguments[0]), list(arguments[1:])
    asked = next((index for index, word in enumerate(own_words(rest)) if word in HELP), None)
    if asked is not None and not command.own_help:
        from lockstep.main.help import command_help

        after = rest[asked + 1 : asked + 2]
        print(command_help(command, after[0] if after and not after[0].startswith("-") else None))
        return 0
    return command.run(rest)


def own_words(arguments: Sequence[str]) -> Sequence[str]:
    """The words of a command line before ``--``, after which another program's begin.

    Args:
        arguments: The command line.
    """
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """A command line without ``--debug``, and whether it was there; another program's after ``--`` stays with it.

    Args:
        arguments: The command line.
    """
    own = own_words(arguments)
    return [word for word in own if word != DEBUG] + list(arguments[len(own) :]), DEBUG in own


def main() -> None:
    """Entry point: run the command of this process's arguments and leave the job in order.

    Raises:
        SystemExit: The command failed; it carries the exit code.
    """
    from lockstep.hosts import run_main

    arguments, debug = without_debug(sys.argv[1:])
    run_main(lambda: run(arguments), debug=debug)
