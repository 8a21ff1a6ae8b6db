"""Commands that only read files: they start at once, without jax, and take their arguments as other tools do."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from lockstep.errors import ConfigError, LockstepError

INTERRUPTED_EXIT_CODE = 130


class Arguments(argparse.ArgumentParser):
    """A parser whose errors are those of a configuration.

    Args:
        command: The word after ``lockstep``.
        text: What the command does.
    """

    def __init__(self, command: str, text: str) -> None:
        super().__init__(
            prog=f"lockstep {command}",
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="store_true", help="show this text")

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the arguments.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}. See {self.prog} --help.")


def seconds(text: str) -> float:
    """Return a time of at least a tenth of a second, as an argument has it.

    Args:
        text: The argument.

    Raises:
        argparse.ArgumentTypeError: It is no such time.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return value


def run_locally(command: Callable[[], int]) -> int:
    """Run a command whose errors are told in a line.

    Args:
        command: The command, which returns its exit code.

    Returns:
        The exit code: 1 after an error, 130 after Ctrl-C.
    """
    try:
        return command()
    except (LockstepError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # who read the output has gone, as in "| head"
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
