"""``lockstep sample``: completions from a checkpoint, on any number of hosts."""

import logging
from collections.abc import Sequence

from lockstep.batch_inference import SampleConfig, sample
from lockstep.hosts import start
from lockstep.main.arguments import parse_arguments


def main(arguments: Sequence[str]) -> int:
    """Sample as the command line says.

    Args:
        arguments: The command line after ``lockstep sample``.

    Returns:
        The exit code: 0; 1 where a host failed.

    Raises:
        ConfigError: The configuration cannot work.
        HostError: The hosts lost each other.
    """
    config = parse_arguments(SampleConfig, arguments)
    hosts = start(config.trainer.distributed)
    logging.basicConfig(level=logging.INFO if hosts.is_leader else logging.WARNING, format="%(name)s: %(message)s")
    return sample(config, hosts)
