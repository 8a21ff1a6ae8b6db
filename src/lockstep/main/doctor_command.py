"""``lockstep doctor``: what is wrong with a machine, a job or a pod, and what to do about it."""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig
from lockstep.main.arguments import decode_config, parse_arguments, read_values
from lockstep.main.doctor import DoctorConfig, examine, read_needs

SWITCHES: Final = ("self-test", "self_test")
"""The options that may stand without a value."""


def main(arguments: Sequence[str]) -> int:
    """Examine as the command line says.

    Returns:
        The exit code: 1 where something needs a fix, else 0.

    Raises:
        ConfigError: The command line or the configuration cannot be read.
        PeerError: The report cannot be written.
        HostTimeoutError: A process is missing.
    """
    own, rest = _split(arguments)
    config = parse_arguments(DoctorConfig, own)
    values = read_values(rest)
    needs = read_needs(config, values)
    distributed = decode_config(DistributedConfig, needs.distributed, "trainer.distributed")
    distributed = dataclasses.replace(
        distributed, timeout_s=config.timeout_s, initialization_timeout_s=max(1, round(config.timeout_s))
    )
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    return examine(config, needs, distributed, Console(file=sys.stdout))


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command itself, and those of the run's configuration."""
    names = {field.name for field in dataclasses.fields(DoctorConfig)}
    own: list[str] = []
    rest: list[str] = []
    todo = list(arguments)
    while todo:
        flag = todo.pop(0)
        name, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} was not expected. See lockstep doctor --help.")
        if not equals and name in SWITCHES and (not todo or todo[0].startswith("--")):
            value = "true"
        elif not equals:
            if not todo or todo[0].startswith("--"):
                raise ConfigError(f"argument --{name} has no value. See lockstep doctor --help.")
            value = todo.pop(0)
        name = "self_test" if name in SWITCHES else name
        if name == "buckets" and not value.startswith("["):  # one of them, or several with commas
            value = f"[{value}]"
        (own if name in names else rest).append(f"--{name}={value}")
    return own, rest
