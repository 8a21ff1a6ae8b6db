"""What the configuration of every training command says, beyond the settings of a run."""

import dataclasses
from typing import ClassVar

from lockstep.main.run import RunConfig
from lockstep.training import DataConfig, LossFn, RolloutConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The data and the loss of a training command, and what ``lockstep plan`` has to know of them."""

    ROW_NAME: ClassVar[str] = "sequences"
    """What a row of a batch is called in messages, in the plural."""
    SEQUENCES_PER_ROW: ClassVar[int] = 1
    """The number of sequences in a row of a batch: 2 for pairs."""

    data: DataConfig

    @property
    def objective(self) -> LossFn:
        """The loss with these settings."""
        raise NotImplementedError

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the model is on the devices beside the one that is trained."""
        return False

    @property
    def rollouts(self) -> RolloutConfig | None:
        """How completions are sampled before each step; None: the rows are read from files."""
        return None
