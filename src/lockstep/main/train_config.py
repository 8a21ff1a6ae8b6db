"""What the configuration of every training command says, beyond the settings of a run."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax

from lockstep.main.run import RunConfig
from lockstep.training import DataConfig, LossFn, RolloutConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The data and the loss of a training command, and what ``lockstep plan`` has to know of them."""

    ROW_NAME: ClassVar[str] = "sequences"
    """What a row of a batch is called in messages, in the plural."""
    SEQUENCES_PER_ROW: ClassVar[int] = 1
    """The number of sequences in a row of a batch: 2 for pairs."""

    data: DataConfig

    @property
    def loss_fn(self) -> LossFn:
        """The loss with these settings."""
        raise NotImplementedError

    def make_objective(self, tokenizer: "PreTrainedTokenizerBase") -> LossFn:
        """Return the loss of a run with a tokenizer.

        Args:
            tokenizer: The tokenizer.
        """
        return self.loss_fn

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and type of one row of each column of a batch.

        Args:
            model_max_seq_len: The number of tokens of the model's longest sequence.

        Raises:
            ConfigError: The rows would be longer than the model allows.
        """
        return self.data.columns(model_max_seq_len)

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the model is on the devices beside the one that is trained."""
        return False

    @property
    def updates_per_rollout(self) -> int:
        """The number of train steps that learn from what one rollout samples."""
        return 1

    @property
    def rollout_answers(self) -> int:
        """The number of completions of a rollout."""
        return self.trainer.train_batch_size

    @property
    def rollouts(self) -> RolloutConfig | None:
        """How completions are sampled before each step; None: the rows are read from files."""
        return None
