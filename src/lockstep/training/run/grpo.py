"""The configuration of ``train-grpo``: reinforcement learning on questions with verifiable answers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import jax

from lockstep.config_fields import FilePath
from lockstep.errors import ConfigError, refuse_keys
from lockstep.hosts import Hosts
from lockstep.models import fingerprint, read_decoder
from lockstep.report import Row
from lockstep.text import StopFinder, set_tools, token_count
from lockstep.training.data import GrpoDataConfig, TokenCache
from lockstep.training.objectives import GrpoConfig, GrpoFields
from lockstep.training.rl import GrpoRunFields, Questions, Rollouts, load_questions, make_rewarder
from lockstep.training.rl.config import RolloutConfig
from lockstep.training.rl.environment import Tool
from lockstep.training.rl.packing import packed_columns
from lockstep.training.rl.reward_models import ModelReward
from lockstep.training.rl.rewards import labels
from lockstep.training.rl.rollout import FrozenModels
from lockstep.training.run.config import RenewalFields, Setup
from lockstep.training.run.teacher import check_teacher, load_teacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainGrpoConfig(GrpoFields, GrpoRunFields, RenewalFields):
    """Settings of ``train-grpo``."""

    CROSS_ENTROPY: ClassVar[bool] = False
    REFUSED: ClassVar[Mapping[str, str]] = {
        "trainer.steps_per_eval": "Held-out questions are answered every inference_eval.eval_every steps. Remove it.",
        "trainer.per_device_eval_parallelism": "Held-out questions are answered by inference_eval. Remove it.",
    }

    data: GrpoDataConfig
    """Questions with answers that can be checked."""

    teacher: FilePath | None = None
    """A Hugging Face checkpoint, a directory or a URL, of a model with the same token ids whose probabilities are
    learned with ``teacher_coefficient`` (docs/grpo.md); null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_keys(self, "train-grpo")
        self.check_loss()
        if (self.teacher is not None) != (self.teacher_coefficient > 0):
            raise ConfigError(
                f"teacher is {self.teacher or 'null'} and teacher_coefficient is {self.teacher_coefficient}: neither "
                "does anything alone. Set both, with a coefficient such as 1, or neither."
            )
        wait_s, taught = self.trainer.distributed.timeout_s, self.teacher is not None
        self.check_run(self.trainer.train_batch_size, wait_s, self.importance_cap, taught=taught)
        length, new = self.data.max_seq_len, self.rollout.max_new_tokens
        if length is not None and new >= length:
            raise ConfigError(
                f"rollout.max_new_tokens is {new} and data.max_seq_len is {length}; prompt and answer together must "
                f"fit a row. Lower rollout.max_new_tokens to less than {length}, or raise data.max_seq_len."
            )

    @property
    def validation_urls(self) -> tuple[()]:
        """Nothing: held-out questions are answered by ``inference_eval``."""
        return ()

    @property
    def loss_fn(self) -> GrpoConfig:
        """The loss with these settings."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(GrpoFields)}
        return GrpoConfig(**settings, temperature=self.rollout.temperature)

    def read_tokenizer(self, fetched: bytes = b"") -> "PreTrainedTokenizerBase":
        """Return the tokenizer, whose chat template describes the tools of the environment."""
        tokenizer = super().read_tokenizer(fetched)
        set_tools(tokenizer, self._tools)
        return tokenizer

    @property
    def _tools(self) -> Sequence[Tool]:
        return () if self.environment is None else self.environment.tools()

    def make_objective(self, tokenizer: "PreTrainedTokenizerBase") -> GrpoConfig:
        """Return the loss of a run with a tokenizer: ids beyond it are never drawn, and have no probability."""
        return dataclasses.replace(self.loss_fn, vocab_size=token_count(tokenizer))

    @property
    def row_name(self) -> str:
        """See `TrainConfig.row_name`."""
        return "answers"

    @property
    def has_reference(self) -> bool:
        """Whether the loss has a penalty for the distance to a frozen copy of the model."""
        return self.kl_coefficient > 0

    @property
    def rollouts(self) -> RolloutConfig:
        """The settings by which the answers of a batch are sampled."""
        return self.rollout

    @property
    def updates_per_rollout(self) -> int:
        """The number of train steps that learn from what one rollout samples."""
        return self.updates

    @property
    def rollout_answers(self) -> int:
        """The number of answers of a rollout."""
        return self.trainer.train_batch_size * self.minibatches

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and type of one row of each column of a batch, see `TrainConfig.columns`."""
        columns = self.loss_fn.columns(self.data.row_length(model_max_seq_len), on_policy=self.updates == 1)
        return packed_columns(columns)

    def load(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model_max_seq_len: int,
        seed: int,
        hosts: Hosts | None = None,
        vocab_size: int | None = None,
    ) -> Questions:
        """Read and tokenise the questions, and check the rewards with them. Every host makes this call.

        Args:
            hosts: The hosts that make this call together; None for this one alone.
            vocab_size: The number of rows of the model's embedding; None: its tokens are not checked.

        Raises:
            ConfigError: A file, a record, the tokenizer or a reward cannot be used.
            PeerError: The same, where hosts are given; raised on all of them.
        """
        if hosts is None:
            return self._load(tokenizer, model_max_seq_len, seed, vocab_size)
        with hosts.run_on_all("reading questions"):
            questions = self._load(tokenizer, model_max_seq_len, seed, vocab_size)
        return questions

    def load_validation(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model_max_seq_len: int,
        hosts: Hosts | None = None,
        vocab_size: int | None = None,
    ) -> dict[str, TokenCache]:
        """Return nothing: held-out questions are answered by ``inference_eval``."""
        return {}

    def facts(self) -> dict[str, str]:
        """See `TrainConfig.facts`: also the teacher and the reward models."""
        models = {} if self.teacher is None else {"teacher": self.teacher}
        named = zip(labels(self.rewards), self.rewards, strict=True)
        models |= {f"reward model {name}": reward.model for name, reward in named if isinstance(reward, ModelReward)}
        return super().facts() | {name: fingerprint(model) for name, model in models.items()}

    def _load(
        self, tokenizer: "PreTrainedTokenizerBase", model_max_seq_len: int, seed: int, vocab_size: int | None
    ) -> Questions:
        StopFinder(tokenizer).check(self.rollout.stop)
        if self.teacher is not None:
            check_teacher(self.teacher, tokenizer, self.data.row_length(model_max_seq_len))
        self.rollout.alarms.load_action()
        questions = load_questions(
            self.data,
            tokenizer,
            row_length=self.data.row_length(model_max_seq_len),
            max_new_tokens=self.rollout.max_new_tokens,
            seed=seed,
            rewards=self.rewards if self.environment is None else (),
            own=None if self.environment is None else self.environment.questions(),
            vocab_size=vocab_size,
        )
        if self.environment is not None:
            texts = [prompt for prompt in questions.prompts if prompt.messages is None]
            if texts and self._tools:
                raise ConfigError(
                    f"the environment has tools, which a chat template describes, and data.format {self.data.format} "
                    f"makes texts, such as {texts[0].shown!r:.80}. Use data.format: chat."
                )
            return questions
        prompt = questions.prompts[0]
        answer = Row(
            step=0,
            prompt_id=0,
            generation_id=0,
            prompt=prompt.shown,
            generated_text=prompt.answer or "",
            num_tokens=1,
            finish_reason="stop",
            mean_logprob=0.0,
        )
        make_rewarder(self).check(answer, prompt, 0.8 * self.trainer.distributed.timeout_s)
        return questions

    @property
    def source(self) -> "TrainGrpoConfig":
        """See `TrainConfig.source`: the rewards are checked with the questions."""
        return self

    def make_batches(self, setup: Setup[Questions]) -> Rollouts:
        """Return the batches of a run, and add them to its hooks."""
        trainer = setup.trainer
        rollouts = Rollouts(
            self,
            self.make_objective(setup.tokenizer),
            setup.data,
            setup.tokenizer,
            trainer,
            frozen=FrozenModels(
                reference=setup.reference(self.renewal) if self.has_reference else None,
                teacher=None if self.teacher is None else load_teacher(self.teacher, trainer),
            ),
            model=read_decoder(setup.model)[0],
        )
        rollouts.check(setup.model)
        trainer.add_hook(rollouts)
        return rollouts
