"""``lockstep train-lm``: next-token prediction and supervised fine-tuning."""

import dataclasses
from collections.abc import Sequence

from lockstep.main.run import rows_as_batches, run_command
from lockstep.main.train_config import TrainConfig
from lockstep.training import LmDataConfig, LossFn, lm_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainLmConfig(TrainConfig):
    """Settings of ``train-lm``."""

    data: LmDataConfig
    """What to train on."""

    @property
    def loss_fn(self) -> LossFn:
        """The mean negative log-probability of the target tokens."""
        return lm_loss


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says.

    Args:
        arguments: The command line after ``lockstep train-lm``.

    Returns:
        The exit code.

    Raises:
        ConfigError: The configuration cannot work.
        PeerError: A host failed where all must go on together.
    """
    return run_command(TrainLmConfig, arguments, lambda config: (config.data, config.make_objective, rows_as_batches))
