"""The configurations of ``train-preference`` and ``train-simpo``: optimisation on pairs of responses."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from lockstep.errors import ConfigError
from lockstep.models import fingerprint
from lockstep.training.data import CachedRows, PreferenceDataConfig
from lockstep.training.loop.logprobs import ReferenceLogprobs
from lockstep.training.objectives import REFERENCE, PreferenceObjective, SimpoConfig
from lockstep.training.run.config import Setup, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PairsConfig(TrainConfig):
    """Settings of a command that trains on pairs."""

    ROW_NAME: ClassVar[str] = "pairs"
    SEQUENCES_PER_ROW: ClassVar[int] = 2

    data: PreferenceDataConfig
    """Preference pairs."""

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See `TrainConfig.columns`."""
        columns = super().columns(model_max_seq_len)
        if self.has_reference:
            columns[REFERENCE] = jax.ShapeDtypeStruct((2,), np.float32)
        return columns

    def make_batches(self, setup: Setup[CachedRows]) -> CachedRows:
        """Return the rows of a run, and have the reference added to them where there is one."""
        if self.has_reference:
            trainer = setup.trainer
            trainer.reference = ReferenceLogprobs(
                self.loss_fn, setup.reference(), self.trainer, trainer.mesh, trainer.hosts
            )
        return setup.data


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPreferenceConfig(_PairsConfig):
    """Settings of ``train-preference``.

    Raises:
        ConfigError: A value is out of its range.
    """

    objective: PreferenceObjective
    """The loss, such as ``{type: dpo, beta: 0.1}``; a class of your own is ``{type: "my_module:MyObjective"}``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.data_format.reference and not self.objective.NEEDS_REFERENCE:
            raise ConfigError(
                f"data.format is {self.data.format}, and the objective has no use for a reference model. Use format: "
                "preference, or an objective such as dpo."
            )

    @property
    def loss_fn(self) -> PreferenceObjective:
        """The loss."""
        return self.objective

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a frozen copy of the model."""
        return self.objective.NEEDS_REFERENCE and not self.data.data_format.reference

    def facts(self) -> dict[str, str]:
        """See `TrainConfig.facts`: the reference, which a run that goes on reads again."""
        if not self.has_reference or self.initialize_from_hf is None:
            return {}
        return {"reference model": fingerprint(self.initialize_from_hf)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSimpoConfig(_PairsConfig):
    """Settings of ``train-simpo``, which is ``train-preference`` with SimPO, whose settings are keys of their own.

    Raises:
        ConfigError: A value is out of its range.
    """

    beta: float = 2.0
    """Scale of the reward, see `SimpoConfig`."""
    gamma_beta_ratio: float = 0.5
    """Target margin as a fraction of ``beta``, see `SimpoConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.loss_fn

    @property
    def loss_fn(self) -> SimpoConfig:
        """The loss with these settings."""
        return SimpoConfig(beta=self.beta, gamma_beta_ratio=self.gamma_beta_ratio)
