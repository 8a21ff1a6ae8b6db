"""The commands that start a job: ``train-lm``, ``train-preference``, ``train-simpo``, ``train-grpo`` and ``sample``."""

import logging
import re
from collections.abc import Sequence

from lockstep.batch_inference import SampleConfig
from lockstep.batch_inference import sample as run_sample
from lockstep.hosts import DistributedConfig, Hosts, start
from lockstep.main.arguments import parse_arguments
from lockstep.training import TrainConfig, TrainGrpoConfig, TrainLmConfig, TrainPreferenceConfig, TrainSimpoConfig
from lockstep.training import train as run_train


def train_lm(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-lm``, see `train`."""
    return train(TrainLmConfig, arguments)


def train_preference(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-preference``, see `train`."""
    return train(TrainPreferenceConfig, arguments)


def train_simpo(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-simpo``, see `train`."""
    return train(TrainSimpoConfig, arguments)


def train_grpo(arguments: Sequence[str]) -> int:
    """Run ``lockstep train-grpo``, see `train`."""
    return train(TrainGrpoConfig, arguments)


def train(cls: type[TrainConfig], arguments: Sequence[str]) -> int:
    """Train as the command line says.

    Returns:
        The exit code, see `lockstep.training.train`.

    Raises:
        ConfigError: The configuration cannot work.
        PeerError: A host failed where all must go on together.
        HostError: The hosts lost each other.
    """
    config = parse_arguments(cls, [re.sub(r"^--resume(?==|$)", "--trainer.resume", each) for each in arguments])
    hosts = _join(config.trainer.distributed)
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax says a dozen things about every save
    return run_train(config, hosts)


def sample(arguments: Sequence[str]) -> int:
    """Sample as the command line says.

    Returns:
        The exit code: 0; 1 where a host failed.

    Raises:
        ConfigError: The configuration cannot work.
        HostError: The hosts lost each other.
    """
    config = parse_arguments(SampleConfig, arguments)
    return run_sample(config, _join(config.trainer.distributed))


def _join(distributed: DistributedConfig) -> Hosts:
    """Join the job; the leader alone logs what is no warning."""
    hosts = start(distributed)
    logging.basicConfig(level=logging.INFO if hosts.is_leader else logging.WARNING, format="%(name)s: %(message)s")
    return hosts
