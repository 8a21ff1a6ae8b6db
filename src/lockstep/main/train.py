"""The training commands: ``train-lm``, ``train-preference``, ``train-simpo`` and ``train-grpo``."""

import logging
import re
from collections.abc import Sequence

from lockstep.hosts import start
from lockstep.main.arguments import parse_arguments
from lockstep.training import (
    TrainConfig,
    TrainGrpoConfig,
    TrainLmConfig,
    TrainPreferenceConfig,
    TrainSimpoConfig,
    train,
)


def lm(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-lm``, see `run`."""
    return run(TrainLmConfig, arguments)


def preference(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-preference``, see `run`."""
    return run(TrainPreferenceConfig, arguments)


def simpo(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-simpo``, see `run`."""
    return run(TrainSimpoConfig, arguments)


def grpo(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-grpo``, see `run`."""
    return run(TrainGrpoConfig, arguments)


def run(cls: type[TrainConfig], arguments: Sequence[str]) -> int:
    """Train as the command line says.

    Args:
        cls: The class of the command's configuration.
        arguments: The command line after the command's name.

    Returns:
        The exit code, see `lockstep.training.train`.

    Raises:
        ConfigError: The configuration cannot work.
        PeerError: A host failed where all must go on together.
        HostError: The hosts lost each other.
    """
    config = parse_arguments(cls, [re.sub(r"^--resume(?==|$)", "--trainer.resume", each) for each in arguments])
    hosts = start(config.trainer.distributed)
    logging.basicConfig(level=logging.INFO if hosts.is_leader else logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax says a dozen things about every save
    return train(config, hosts)
