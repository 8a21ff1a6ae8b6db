"""The ``inference_eval`` block of a training configuration."""

import dataclasses
from typing import Any, Literal

from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.report.metrics import load_metrics
from lockstep.text import read_prompts
from lockstep.types import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceEvalConfig:
    """When to sample during training, what, and within which limits.

    Raises:
        ConfigError: a value that cannot work; names the field, the value, the limit and the fix.
        PromptError: an inline list of prompts that is empty or holds an empty prompt.
    """

    enabled: bool = True
    """Whether to sample at all."""
    eval_every: int = 100
    """Sample after every so many completed steps."""
    at_start: bool = False
    """Sample before the first step too."""
    at_end: bool = True
    """Sample after the last step too, whatever its number: honour the forced last call of the training loop."""
    prompts: list[dict[str, Any] | str] | str = dataclasses.field(default_factory=list)
    """A list of texts, ``{prompt, answer}`` or ``{messages, answer}``, or a .txt or .jsonl file (local or URL)."""
    prompts_per_round: int | None = None
    """Prompts of a round, dealt from all of them as from a shuffled pack; ``seed`` and the step say which. Null: all of
    them in every round."""
    max_new_tokens: int = 64
    """Tokens to sample per answer at most."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    """Draw from the k most probable tokens; null: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of most probable tokens that has this probability; 1: from all."""
    min_p: float = 0.0
    """Draw from the tokens at least this times as probable as the most probable one; 0: from all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens seen before and multiplies the negative ones; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it is in the answer so far."""
    min_tokens: int = 0
    """Tokens to sample before an answer may end with a stop token."""
    ignore_eos: bool = False
    """Stop tokens do not end an answer: every answer has ``max_new_tokens``."""
    stop_token_ids: list[int] | None = None
    """Tokens that end an answer; null: the tokenizer's end-of-sequence and end-of-turn tokens."""
    stop: list[str] = dataclasses.field(default_factory=list)
    """Texts that end an answer, also where they straddle tokens; what is shown ends before the text."""
    n_generations: int = 1
    """Answers per prompt."""
    seed: int = 0
    """With prompt, generation and position, all that a random draw depends on."""
    max_seq_len: int | None = None
    """Tokens of prompt and answer together; a longer prompt is refused by name. Null: as long as the longest."""
    max_seqs: int | None = None
    """Sequences decoded at a time; more wait their turn. Null: worked out."""
    page_size: int | None = None
    """Tokens per page of the KV cache. Null: worked out."""
    max_pages: int | None = None
    """Pages of one replica's KV cache; what does not fit waits its turn. Null: worked out."""
    hbm_utilization: float = 0.9
    """Share of the free device memory that sampling may use; free is what the fullest device of all hosts has left."""
    max_prefill_size: int | None = None
    """Prompt tokens that a replica prefills in one launch. Null: worked out."""
    max_prompts_per_batch: int | None = None
    """Prompts that are held at a time; the next begins when one has all its answers. Null: worked out."""
    kv_cache_dtype: str = "auto"
    """``auto`` | ``int8``: the KV cache in the compute dtype, or in 8 bits with a scale for each token and head. With
    int8, ``logprob_gap`` of ``audit`` measures the rounding too. Not on TPU."""
    layout: dict[str, int] | str = "auto"
    """auto | training | {tensor: N} | {tensor: 1, replicas: M}: where the weights lie while decoding."""
    allow_multihost: bool = True
    """False refuses to sample in a job of several processes."""
    timeout_s: float = 300.0
    """Seconds that a wait for other hosts or a device call may last."""
    max_seconds: float | None = None
    """Seconds that generation may last in a round, by the leader's clock, looked at between launches; compiling does
    not count. Unfinished answers are shown as far as they got, with finish_reason "budget". Null: no limit."""
    on_error: Literal["skip", "raise"] = "skip"
    """What a failed round does on every host alike: skip it and train on, or raise."""
    max_consecutive_errors: int | None = 5
    """After so many rounds in a row that were skipped, sampling switches itself off for the rest of the run, and says
    so. Null: never."""
    metrics: list[str] = dataclasses.field(default_factory=list)
    """``exact_match``, or ``module:function`` of (row, prompt) -> float."""
    audit: bool = False
    """Recompute every log-probability with the training forward and log the largest difference, ``logprob_gap``."""
    skip_samples_table: bool = False
    """Log scalars only: no table in the tracker and none at the terminal."""

    def __post_init__(self) -> None:
        if self.eval_every < 1:
            raise ConfigError(
                f"inference_eval.eval_every is {self.eval_every}; it must be at least 1. Set enabled: false to switch "
                "sampling off."
            )
        if self.timeout_s <= 0:
            raise ConfigError(
                f"inference_eval.timeout_s is {self.timeout_s}; it must be more than 0 seconds. The default is 300."
            )
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ConfigError(
                f"inference_eval.max_seconds is {self.max_seconds}; it must be more than 0. Use null for no limit."
            )
        given: object = self.stop
        if isinstance(given, str):
            raise ConfigError(f"inference_eval.stop is {given!r}; it must be a list of strings. Use [{given!r}].")
        if self.on_error not in ("skip", "raise"):
            raise ConfigError(f"inference_eval.on_error is {self.on_error!r}; it must be skip or raise.")
        if self.max_consecutive_errors is not None and self.max_consecutive_errors < 1:
            raise ConfigError(
                f"inference_eval.max_consecutive_errors is {self.max_consecutive_errors}; it must be at least 1. Use "
                "null to go on sampling whatever fails."
            )
        if self.prompts_per_round is not None and self.prompts_per_round < 1:
            raise ConfigError(
                f"inference_eval.prompts_per_round is {self.prompts_per_round}; it must be at least 1. Use null for "
                "all prompts in every round."
            )
        self._check_effect()
        try:
            self.sampling_params(())
            self.engine_config(None)
            load_metrics(self.metrics)
            if self.enabled and not isinstance(self.prompts, str):
                self.check_prompts_per_round(len(read_prompts(self.prompts)))
        except LockstepError as error:
            raise type(error)(f"inference_eval: {error}") from None

    def _check_effect(self) -> None:
        """Refuses what would do nothing: a configuration says what happens."""
        neutral: dict[str, Any] = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
        for name, value in neutral.items():
            if self.temperature == 0 and getattr(self, name) != value:
                raise ConfigError(
                    f"inference_eval.{name} is {getattr(self, name)} and temperature is 0, which is greedy: {name} "
                    f"would do nothing. Set temperature to more than 0, or remove {name}."
                )
        if self.ignore_eos and self.min_tokens:
            raise ConfigError(
                f"inference_eval.min_tokens is {self.min_tokens} and ignore_eos is true: no stop token ends an answer, "
                "so min_tokens would do nothing. Remove one of the two."
            )

    def check_prompts_per_round(self, count: int) -> None:
        """Refuses a sample that would not be one.

        Args:
            count: of the prompts that there are.

        Raises:
            ConfigError: there are no more prompts than ``prompts_per_round``.
        """
        if self.prompts_per_round is not None and self.prompts_per_round >= count:
            raise ConfigError(
                f"prompts_per_round is {self.prompts_per_round} and there are {count} prompts: every round would have "
                f"the same. Set it to at most {count - 1}, or use null for all prompts in every round."
                if count > 1
                else f"prompts_per_round is {self.prompts_per_round} and there is 1 prompt. Remove prompts_per_round."
            )

    def sampling_params(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        """How every prompt is sampled.

        Args:
            stop_ids: of the tokenizer, used where ``stop_token_ids`` is null.
        """
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=stop_ids if self.stop_token_ids is None else tuple(self.stop_token_ids),
            stop=tuple(self.stop),
            seed=self.seed,
            n_generations=self.n_generations,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )

    def engine_config(self, dtype: str | None) -> EngineConfig:
        """The engine's part of the block.

        Args:
            dtype: to decode in; None: the dtype of the parameters.
        """
        return EngineConfig(
            max_seq_len=self.max_seq_len,
            max_seqs=self.max_seqs,
            page_size=self.page_size,
            max_pages=self.max_pages,
            hbm_utilization=self.hbm_utilization,
            max_prefill_size=self.max_prefill_size,
            max_prompts_per_batch=self.max_prompts_per_batch,
            layout=self.layout,
            dtype=dtype,
            kv_cache_dtype=self.kv_cache_dtype,
        )
