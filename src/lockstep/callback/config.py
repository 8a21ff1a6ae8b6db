"""The ``inference_eval`` block of a training configuration."""

import dataclasses
import functools
from typing import ClassVar, Literal

from lockstep.callback.evaluation import TasksConfig
from lockstep.config_fields import check_fields
from lockstep.engine import SamplingBlock
from lockstep.errors import ConfigError, LockstepError, check_at_least
from lockstep.report import JUDGE, AlarmsConfig, EvaluationFields, JudgeConfig, check_metrics
from lockstep.text import read_prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceEvalConfig(EvaluationFields, SamplingBlock):
    """When to sample during training, what, and within which limits.

    Raises:
        ConfigError: A value cannot work; the message names the field, the value, the limit and the fix.
        PromptError: An inline list of prompts is empty or has an empty prompt.

    Example:
        >>> config = lockstep.InferenceEvalConfig(prompts=["Once upon a time"], eval_every=50, temperature=0.7)
        >>> config.at_end
        True
    """

    BLOCK: ClassVar[str] = "inference_eval"

    enabled: bool = True
    """Whether to sample at all."""
    eval_every: int = 100
    """Sample after every so many completed steps."""
    at_start: bool = False
    """Sample before the first step too."""
    at_end: bool = True
    """Sample after the last step too, whatever its number: honour the forced last call of the training loop."""
    prompts_per_round: int | None = None
    """The number of prompts of a round, dealt from all of them as from a shuffled pack; ``seed`` and the step decide
    which. Null: all of them in every round."""
    max_seq_len: int | None = None
    """Tokens of prompt and answer together; a longer prompt is refused by name. Null: as long as the longest."""
    allow_multihost: bool = True
    """Whether sampling is allowed in a job of several processes; if not, such a job is refused."""
    timeout_s: float = 300.0
    """Seconds that a wait for other hosts or a device call may last."""
    max_seconds: float | None = None
    """Seconds that generation may last in a round, by the leader's clock, looked at between launches; compiling does
    not count. Unfinished answers are shown as far as they got, with finish_reason "budget". Null: no limit."""
    flush_s: float = 60.0
    """Seconds that the end of training waits for reports of rounds that are not done: metrics, file, table, tracker."""
    on_error: Literal["skip", "raise"] = "skip"
    """The reaction of every host to a round that failed: skip it and train on, or raise."""
    max_consecutive_errors: int | None = 5
    """After so many rounds in a row that were skipped, sampling switches itself off for the rest of the run, and says
    so. Null: never."""
    token_logprobs: bool = False
    """Write the text and the log-probability of every token into ``samples.jsonl`` too, where ``lockstep report`` shows
    them in colours. About 25 bytes per token."""
    keep_tokens: bool = False
    """Write the id and the log-probability of every token into ``samples.jsonl`` too, as ``token_ids`` and
    ``logprobs``, for programs that go on with them. About 25 bytes per token."""
    tasks: TasksConfig = dataclasses.field(default_factory=TasksConfig)
    """Tasks of lm-evaluation-harness, run after the samples of a round (docs/evaluation.md)."""
    judge: JudgeConfig | None = None
    """A model elsewhere that judges each answer; its verdict is the metric ``judge``. Null: none."""
    alarms: AlarmsConfig = dataclasses.field(default_factory=AlarmsConfig)
    """When a state of answers is an alarm, and what becomes of it (docs/health.md)."""
    audit: bool = False
    """Recompute every log-probability with the training forward and log the largest difference, ``logprob_gap``, and
    the mean one, ``logprob_gap_mean``; where the engine computes or multiplies in fewer than 32 bits, also
    ``logprob_noise`` and ``logprob_noise_mean``, the differences between that forward and the same in float32. Up to
    about twice the mean noise, a mean gap is rounding (docs/sampler.md)."""

    def __post_init__(self) -> None:
        check_fields(self, "inference_eval.")
        check = functools.partial(check_at_least, self, block="inference_eval.")
        self.alarms.check_health(self.health, "inference_eval")
        check(1, "eval_every", fix=". Set enabled: false to switch sampling off.")
        check(0, "timeout_s", fix=" seconds. The default is 300.", above=True)
        check(0, "max_seconds", fix=". Use null for no limit.", above=True)
        check(0, "flush_s", fix=" seconds. The default is 60.")
        check(1, "max_consecutive_errors", fix=". Use null to go on sampling whatever fails.")
        check(1, "prompts_per_round", fix=". Use null for all prompts in every round.")
        if self.tasks.every is not None and self.tasks.every % self.eval_every != 0:
            raise ConfigError(
                f"inference_eval.tasks.every is {self.tasks.every}, which is no multiple of eval_every, "
                f"{self.eval_every}: tasks run with a round of samples. Use a multiple, or null for every round."
            )
        self.check_sampling()
        try:
            check_metrics(self.metrics, taken=() if self.judge is None else (JUDGE,))
            if self.enabled and not isinstance(self.prompts, str):
                self.check_prompts_per_round(len(read_prompts(self.prompts)))
        except LockstepError as error:
            raise self.located(error) from None

    def check_prompts_per_round(self, count: int) -> None:
        """Check that ``prompts_per_round`` leaves prompts for other rounds."""
        if self.prompts_per_round is not None and self.prompts_per_round >= count:
            raise ConfigError(
                f"prompts_per_round is {self.prompts_per_round} and there are {count} prompts: every round would have "
                f"the same. Set it to at most {count - 1}, or use null for all prompts in every round."
                if count > 1
                else f"prompts_per_round is {self.prompts_per_round} and there is 1 prompt. Remove prompts_per_round."
            )
