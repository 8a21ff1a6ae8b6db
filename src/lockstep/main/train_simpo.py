"""``lockstep train-simpo``: preference optimisation with SimPO."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lockstep.main.run import rows_as_batches, run_command
from lockstep.main.train_config import TrainConfig
from lockstep.training import PreferenceDataConfig, SimpoConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSimpoConfig(TrainConfig):
    """Settings of ``train-simpo``.

    Raises:
        ConfigError: A value is out of its range.
    """

    ROW_NAME: ClassVar[str] = "pairs"
    SEQUENCES_PER_ROW: ClassVar[int] = 2

    data: PreferenceDataConfig
    """Preference pairs."""
    beta: float = 2.0
    """Scale of the reward, see `SimpoConfig`."""
    gamma_beta_ratio: float = 0.5
    """Target margin as a fraction of ``beta``, see `SimpoConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.objective

    @property
    def objective(self) -> SimpoConfig:
        """The loss with these settings."""
        return SimpoConfig(beta=self.beta, gamma_beta_ratio=self.gamma_beta_ratio)


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says.

    Args:
        arguments: The command line after ``lockstep train-simpo``.

    Returns:
        The exit code.

    Raises:
        ConfigError: The configuration cannot work.
        PeerError: A host failed where all must go on together.
    """
    return run_command(
        TrainSimpoConfig, arguments, lambda config: (config.data, config.make_objective, rows_as_batches)
    )
