"""``lockstep train-lm``: next-token prediction and supervised fine-tuning."""

import dataclasses
from collections.abc import Sequence

from lockstep.main.run import RunConfig, run_command
from lockstep.training import LmDataConfig, lm_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainLmConfig(RunConfig):
    """Settings of ``train-lm``."""

    data: LmDataConfig
    """What to train on."""


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says.

    Args:
        arguments: after ``lockstep train-lm``.

    Returns:
        Exit code.

    Raises:
        ConfigError: the configuration cannot work.
        PeerError: a host failed where all must go on together.
    """
    return run_command(TrainLmConfig, arguments, lambda config: (config.data, lm_loss))
