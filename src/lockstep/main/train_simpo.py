"""``lockstep train-simpo``: preference optimisation with SimPO."""

import dataclasses
from collections.abc import Sequence

from lockstep.main.run import RunConfig, run_command
from lockstep.training import PreferenceDataConfig, SimpoConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSimpoConfig(RunConfig):
    """Settings of ``train-simpo``.

    Raises:
        ConfigError: a value out of its range.
    """

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
        arguments: after ``lockstep train-simpo``.

    Returns:
        Exit code.

    Raises:
        ConfigError: the configuration cannot work.
        PeerError: a host failed where all must go on together.
    """
    return run_command(TrainSimpoConfig, arguments, lambda config: (config.data, config.objective))
