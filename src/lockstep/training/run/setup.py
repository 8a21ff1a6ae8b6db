"""The state of a run before its first step, and the reader of its data."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from jaxtyping import PyTree

from lockstep.hosts import Hosts
from lockstep.models import LoraModel
from lockstep.training.data import TokenCache
from lockstep.training.loop.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Data(Protocol):
    """Rows or questions, tokenised."""

    def __len__(self) -> int:
        """Return the number of rows, or of questions."""
        ...

    def digest(self) -> str:
        """Return the digest of all of it, for hosts to agree on."""
        ...


class DataSource[Loaded: Data](Protocol):
    """The reader of a run's data."""

    CROSS_ENTROPY: ClassVar[bool]
    """Whether the loss on this data is a mean over tokens, of which the exponential is the perplexity."""

    @property
    def validation_urls(self) -> Sequence[object]:
        """The files to validate with."""
        ...

    def load(
        self, tokenizer: "PreTrainedTokenizerBase", model_max_seq_len: int, seed: int, hosts: Hosts | None = None
    ) -> Loaded:
        """Read and tokenise the data; every host makes this call."""
        ...

    def load_validation(
        self, tokenizer: "PreTrainedTokenizerBase", model_max_seq_len: int, hosts: Hosts | None = None
    ) -> Mapping[str, TokenCache]:
        """Read and tokenise the rows to validate with, by the name of their source; every host makes this call."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup[Loaded: Data]:
    """The state of a run before its first step, from which its batches are made.

    Args:
        model: The model that training begins or goes on with.
        model_max_seq_len: The number of tokens of the model's longest sequence.
        initial_model: Makes the model anew as it is before the first step.
        trainer: The trainer, to which hooks can be added.
    """

    data: Loaded
    tokenizer: "PreTrainedTokenizerBase"
    model: PyTree
    model_max_seq_len: int
    initial_model: Callable[[], PyTree]
    trainer: Trainer
    run_dir: Path

    def reference(self) -> PyTree:
        """Return the frozen model; a run that goes on makes the one that it began with anew. Adapters leave one as it
        was, which is used in place: there is no second copy.
        """
        if isinstance(self.model, LoraModel):
            return self.model.base
        fresh = self.trainer.resumed_from is None
        return self.trainer.frozen_copy(self.model if fresh else self.initial_model())
