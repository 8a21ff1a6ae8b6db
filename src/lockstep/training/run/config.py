"""The configurations of training commands but GRPO, the reader of their data, and the state before the first step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import jax
import numpy as np
from jaxtyping import PyTree

from lockstep.callback import InferenceEvalConfig
from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError, check_at_least, check_one_of
from lockstep.hosts import Hosts
from lockstep.models import LoraConfig, LoraModel, ModelConfig, fingerprint
from lockstep.text import load_tokenizer
from lockstep.training.checkpoints.config import HF_DTYPES
from lockstep.training.data import CachedRows, DataConfig, LmDataConfig, PreferenceDataConfig, TokenCache
from lockstep.training.data.example_check import ExampleSource
from lockstep.training.data.rows import Batches
from lockstep.training.loop.batch_source import BatchSource
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.logprobs import ReferenceLogprobs
from lockstep.training.loop.trainer import Trainer
from lockstep.training.objectives import REFERENCE, LossFn, PreferenceObjective, SimpoConfig, lm_loss
from lockstep.training.rl.config import RolloutConfig
from lockstep.training.step.optimizer import OptimizerConfig
from lockstep.training.step.renewal import ReferenceRenewal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Data(ExampleSource, Protocol):
    """Rows or questions, tokenised."""

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
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model_max_seq_len: int,
        seed: int,
        hosts: Hosts | None = None,
        vocab_size: int | None = None,
    ) -> Loaded:
        """Read and tokenise the data; every host makes this call."""
        ...

    def load_validation(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model_max_seq_len: int,
        hosts: Hosts | None = None,
        vocab_size: int | None = None,
    ) -> Mapping[str, TokenCache]:
        """Read and tokenise the rows to validate with, by the name of their source; every host makes this call."""
        ...


def check_validation(config: TrainerConfig, data: DataSource[Any]) -> None:
    """Refuse settings of validation where there is nothing to validate with."""
    for name in ("steps_per_eval", "per_device_eval_parallelism"):
        value = getattr(config, name)
        if value not in (None, -1) and not data.validation_urls:
            raise ConfigError(
                f"trainer.{name} is {value}, but data.validation_urls is empty, so it has no effect. Name files to "
                "validate with, or leave it out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup[Loaded: Data]:
    """The state of a run before its first step, from which its batches are made."""

    data: Loaded
    tokenizer: "PreTrainedTokenizerBase"
    model: PyTree  # the model that training begins or goes on with
    initial_model: Callable[[], PyTree]  # makes the model anew as it is before the first step
    trainer: Trainer  # the trainer, to which hooks can be added
    run_dir: Path

    def reference(self, renewal: ReferenceRenewal | None) -> PyTree:
        """Return the frozen model; a run that goes on makes the one that it began with anew. Adapters leave one as it
        was, which is used in place: there is no second copy. The trainer puts that of an optimizer in its place.
        """
        if renewal is not None:
            return self.model
        if isinstance(self.model, LoraModel):
            return self.model.base
        fresh = self.trainer.resumed_from is None
        return self.trainer.frozen_copy(self.model if fresh else self.initial_model())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings that all training commands have, and what ``lockstep plan`` has to know of them.

    Raises:
        ConfigError: Not exactly one of ``model`` and ``initialize_from_hf`` is given, or a value of ``hf_save_…``
            cannot work or would have no effect.
    """

    data: DataConfig
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    """The training loop."""
    model: ModelConfig | None = None
    """The shape of a model from scratch; null with ``initialize_from_hf``."""
    initialize_from_hf: FilePath | None = None
    """The Hugging Face checkpoint to start from, a directory or a URL; null: a model from scratch."""
    gradient_checkpointing: Literal["nothing", "full", "dots", "offload"] | None = None
    """With ``initialize_from_hf``, what ``model.gradient_checkpointing`` is for a model from scratch; null: full."""
    lora: LoraConfig | None = None
    """Low-rank adapters on the model of ``initialize_from_hf``, which alone are trained; null: all of it is."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""
    tokenizer: FilePath
    """The Hugging Face tokenizer: a directory or a name."""
    trust_remote_code: FilePath | None = None
    """The ``tokenizer`` again, where Python code that it brings may be run; null: none is."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for its chat template, such as ``{enable_thinking: false}``, in training data and prompts."""
    inference_eval: InferenceEvalConfig = dataclasses.field(default_factory=lambda: InferenceEvalConfig(enabled=False))
    """The samples while training; without this block there are none."""
    hf_save_path: FilePath | None = None
    """The place of the trained model as a Hugging Face checkpoint: a directory, where a relative path is below the run
    directory, or a URL; null: nowhere."""
    hf_save_steps: int | None = None
    """The number of steps between two Hugging Face checkpoints while training, at ``<hf_save_path>-step-N``; null: none
    before the last step."""
    hf_save_dtype: str | None = None
    """The float type of Hugging Face checkpoints, ``float32`` or ``bfloat16``; null: that of the parameters."""

    def __post_init__(self) -> None:
        check_fields(self)
        fix = "Set model to train from scratch, or initialize_from_hf to go on from a checkpoint."
        check_one_of(self, "model", "initialize_from_hf", fix)
        if self.gradient_checkpointing is not None and self.model is not None:
            raise ConfigError(
                f"gradient_checkpointing is {self.gradient_checkpointing}, but the model is from scratch: set "
                "model.gradient_checkpointing instead."
            )
        if self.lora is not None and self.model is not None:
            raise ConfigError(
                "lora is given, but the model is from scratch: its random weights would stay as they are. Set "
                "initialize_from_hf instead of model, or leave lora out."
            )
        check_at_least(self, 1, "hf_save_steps", fix=". Raise it, or set null.")
        if self.hf_save_dtype not in (None, *HF_DTYPES):
            raise ConfigError(f"hf_save_dtype is {self.hf_save_dtype!r}; it must be {' or '.join(HF_DTYPES)}, or null.")
        for name in ("hf_save_steps", "hf_save_dtype"):
            if self.hf_save_path is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is set and hf_save_path is null, so it has no effect. Set hf_save_path.")

    def facts(self) -> dict[str, str]:
        """Return facts that hosts, and a checkpoint to go on from, have in common, beyond tokenizer and data: the
        reference, which a run that goes on reads again.
        """
        if not self.has_reference or self.initialize_from_hf is None:
            return {}
        return {"reference model": fingerprint(self.initialize_from_hf)}

    @property
    def source(self) -> DataSource[Any]:
        """The reader of the data. Beside checkpoints in a bucket all hosts share its cache, where nothing else is said:
        their own disks are empty after each preemption, and each would tokenise all of it again.
        """
        checkpointer = self.trainer.checkpointer
        if self.data.cache_dir is None and checkpointer is not None and checkpointer.in_bucket:
            return dataclasses.replace(self.data, cache_dir=f"{checkpointer.base_path.rstrip('/')}/token-cache")
        return self.data

    def make_batches(self, setup: Setup[Any]) -> Batches | BatchSource:
        """Return the batches of a run, here the rows that were read; launches programs only through the trainer."""
        batches: Batches = setup.data
        return batches

    @property
    def loss_fn(self) -> LossFn:
        """The loss with these settings."""
        raise NotImplementedError

    def read_tokenizer(self, fetched: bytes = b"") -> "PreTrainedTokenizerBase":
        """Return the tokenizer, see `load_tokenizer`."""
        checkpoint = self.initialize_from_hf or ""
        return load_tokenizer(self.tokenizer, self.trust_remote_code, fetched, checkpoint, self.chat_template_kwargs)

    def make_objective(self, tokenizer: "PreTrainedTokenizerBase") -> LossFn:
        """Return the loss of a run with a tokenizer."""
        return self.loss_fn

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and type of one row of each column of a batch."""
        return self.data.columns(model_max_seq_len)

    @property
    def row_name(self) -> str:
        """The name of a row of a batch in messages, in the plural."""
        return "sequences"

    @property
    def sequences_per_row(self) -> int:
        """The number of sequences in a row of a batch: 2 for pairs."""
        return 1

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the model is on the devices beside the one that is trained."""
        return False

    @property
    def renewal(self) -> ReferenceRenewal | None:
        """Return how the optimizer keeps and renews the reference model; None: there is none, or it stays as it is."""
        return None

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
        """The settings by which completions are sampled before each step; None: the rows are read from files."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainLmConfig(TrainConfig):
    """Settings of ``train-lm``."""

    data: LmDataConfig
    """The data to train on."""

    @property
    def loss_fn(self) -> LossFn:
        """The mean negative log-probability of the target tokens."""
        return functools.partial(lm_loss, targets_only=not self.data.data_format.documents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PreferencesConfig(TrainConfig):
    """Settings of a command that trains on preferences."""

    data: PreferenceDataConfig
    """Preferences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_fn.PAIRS != self.data.data_format.pairs:
            kinds, name = ["single answers with a label", "pairs"], type(self.loss_fn).__name__
            raise ConfigError(
                f"data.format is {self.data.format}, whose examples are {kinds[self.data.data_format.pairs]}, and "
                f"{name} learns from {kinds[self.loss_fn.PAIRS]}. Use format: "
                f"{'preference' if self.loss_fn.PAIRS else 'unpaired_preference'}, or another objective."
            )
        if not self.loss_fn.PAIRS and self.trainer.train_batch_size < 2:
            raise ConfigError(
                f"trainer.train_batch_size is {self.trainer.train_batch_size}, and {type(self.loss_fn).__name__} pairs "
                "each prompt with the completion of another row. Use at least 2."
            )
        if not self.loss_fn.NEEDS_REFERENCE and self.data.data_format.reference:
            raise ConfigError(
                f"data.format is {self.data.format}, and the objective has no use for a reference model. Use format: "
                "preference, or train-preference with an objective such as dpo."
            )

    @property
    def loss_fn(self) -> PreferenceObjective:
        """The loss of pairs."""
        raise NotImplementedError

    @property
    def row_name(self) -> str:
        """See `TrainConfig.row_name`."""
        return "pairs" if self.loss_fn.PAIRS else "answers"

    @property
    def sequences_per_row(self) -> int:
        """See `TrainConfig.sequences_per_row`."""
        return 2 if self.loss_fn.PAIRS else 1

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a frozen copy of the model."""
        return self.loss_fn.NEEDS_REFERENCE and not self.data.data_format.reference

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
                self.loss_fn, setup.reference(self.renewal), self.trainer, trainer.mesh, trainer.hosts
            )
        return setup.data


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenewalFields(TrainConfig):
    """Settings of commands with a reference model that may follow the model."""

    reference_every: int | None = None
    """The number of updates after which the reference model is renewed (TR-DPO, Gorbatovski et al. 2024,
    https://arxiv.org/abs/2404.09656); null: it stays the model that training begins with."""
    reference_mixup: float | None = None
    """The share of the model in a renewed reference, the rest is of the one before; null: 1, a copy. TRL's default is
    0.6, with a renewal every 512 steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "reference_every", fix=". TRL's default is 512; null is never.")
        check_at_least(self, 0, "reference_mixup", fix=". TRL's is 0.6.", above=True, most=1)
        if self.reference_mixup is not None and self.reference_every is None:
            raise ConfigError(
                f"reference_mixup is {self.reference_mixup} and reference_every is null: it would do nothing. Set "
                "reference_every, or remove reference_mixup."
            )
        if self.reference_every is not None and not self.has_reference:
            raise ConfigError(
                f"reference_every is {self.reference_every}, and the loss has no reference model on the devices: it "
                "would do nothing. Remove it, or use a loss with one."
            )
        if self.lora is not None and self.reference_mixup not in (None, 1.0):
            raise ConfigError(
                f"reference_mixup is {self.reference_mixup} and lora is given: the product of mixed factors is no "
                "mixture of models. Remove reference_mixup, so that the reference is a copy."
            )

    @property
    def renewal(self) -> ReferenceRenewal | None:
        """See `TrainConfig.renewal`."""
        if self.reference_every is None:
            return None
        mixup = 1.0 if self.reference_mixup is None else self.reference_mixup
        return ReferenceRenewal(every=self.reference_every, mixup=mixup, dtype=self.trainer.precision.compute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPreferenceConfig(RenewalFields, _PreferencesConfig):
    """Settings of ``train-preference``."""

    objective: PreferenceObjective
    """The loss, such as ``{type: dpo, beta: 0.1}``; a class of your own is ``{type: "my_module:MyObjective"}``."""

    @property
    def loss_fn(self) -> PreferenceObjective:
        """The loss."""
        return self.objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSimpoConfig(_PreferencesConfig):
    """Settings of ``train-simpo``, which is ``train-preference`` with SimPO, whose settings are keys of their own."""

    beta: float = 2.0
    """Scale of the reward, see `SimpoConfig`."""
    gamma_beta_ratio: float = 0.5
    """Target margin as a fraction of ``beta``, see `SimpoConfig`."""

    @property
    def loss_fn(self) -> SimpoConfig:
        """The loss with these settings."""
        return SimpoConfig(beta=self.beta, gamma_beta_ratio=self.gamma_beta_ratio)
