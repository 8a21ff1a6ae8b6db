"""``lockstep train-grpo``: group-relative policy optimisation. Its configuration is here; the command comes later."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Final

from lockstep.errors import ConfigError
from lockstep.main.train_config import TrainConfig
from lockstep.training import GrpoConfig, GrpoDataConfig, RolloutConfig

NOT_YET: Final = (
    "lockstep train-grpo cannot train yet: the loss and the configuration are there, the loop that samples, rewards "
    "and learns is not. Today lockstep plan --config_path FILE.yaml --topology v6e-16 plans its programs."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainGrpoConfig(TrainConfig):
    """Settings of ``train-grpo``. The command cannot train yet; ``lockstep plan`` reads them.

    Raises:
        ConfigError: A value is out of its range, or the batch is not made of whole groups.
    """

    ROW_NAME: ClassVar[str] = "answers"

    data: GrpoDataConfig
    """Questions with answers that can be checked."""
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    """How answers are sampled."""
    clip_epsilon: float = 0.2
    """See `GrpoConfig`."""
    kl_coefficient: float = 0.0
    """See `GrpoConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.objective
        batch, group = self.trainer.train_batch_size, self.rollout.n_generations
        if batch % group:
            raise ConfigError(
                f"trainer.train_batch_size is {batch} answers and rollout.n_generations is {group}; a batch is made of "
                f"whole groups. Use a multiple of {group}, e.g. {max(1, batch // group) * group}."
            )
        length, new = self.data.max_seq_len, self.rollout.max_new_tokens
        if length is not None and new >= length:
            raise ConfigError(
                f"rollout.max_new_tokens is {new} and data.max_seq_len is {length}; prompt and answer together must "
                f"fit a row. Lower rollout.max_new_tokens to less than {length}, or raise data.max_seq_len."
            )

    @property
    def objective(self) -> GrpoConfig:
        """The loss with these settings."""
        return GrpoConfig(clip_epsilon=self.clip_epsilon, kl_coefficient=self.kl_coefficient)

    @property
    def has_reference(self) -> bool:
        """Whether the loss has a penalty for the distance to a frozen copy of the model."""
        return self.kl_coefficient > 0

    @property
    def rollouts(self) -> RolloutConfig:
        """How the answers of a batch are sampled."""
        return self.rollout


def main(arguments: Sequence[str]) -> int:
    """Say that the command cannot train yet.

    Args:
        arguments: The command line after ``lockstep train-grpo``.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(NOT_YET)
