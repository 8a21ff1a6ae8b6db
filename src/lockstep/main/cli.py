"""The ``lockstep`` command."""

import sys
from collections.abc import Sequence

from lockstep.errors import LockstepError
from lockstep.main.commands import COMMANDS, find_command


def usage() -> str:
    """The text of ``lockstep --help``."""
    width = max(len(command.name) for command in COMMANDS)
    commands = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return (
        "usage: lockstep COMMAND --config_path FILE.yaml [--key.in.dots VALUE ...]\n\n"
        "See what your model says while it trains on a TPU pod.\n\n"
        f"commands:\n{commands}\n\n"
        "lockstep COMMAND --help lists a command's keys. Start it on every host; several processes on one machine:\n"
        "  lockstep launch --backend local --processes 2 --devices_per_process 2 -- lockstep COMMAND ..."
    )


def run(arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no such command, or its configuration cannot work.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    return find_command(arguments[0]).run(arguments[1:])


def main() -> None:
    """Entry point: run the command of this process's arguments and leave the job in order.

    Raises:
        SystemExit: The command failed; it carries the exit code.
    """
    for command in COMMANDS:
        if command.name in sys.argv[1:2] and not command.joins_job:
            sys.exit(run_alone(sys.argv[1:]))
    from lockstep.hosts import run_main

    run_main(lambda: run(sys.argv[1:]))


def run_alone(arguments: Sequence[str]) -> int:
    """Run a command that is not a process of a job, without loading what a job needs.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code.
    """
    try:
        return run(arguments)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
