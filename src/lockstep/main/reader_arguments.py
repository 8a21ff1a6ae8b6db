"""The arguments of commands that only read files: words and options, as other tools take them."""

import argparse
from typing import NoReturn

from lockstep.errors import ConfigError


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
