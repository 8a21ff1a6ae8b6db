"""The ``rollout`` block of a configuration."""

import dataclasses
from typing import ClassVar

from lockstep.engine import SamplingBlock
from lockstep.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingBlock):
    """How completions are sampled before each step, from the very weights that the step then changes.

    Raises:
        ConfigError: A value is out of its range, or would have no effect.
    """

    BLOCK: ClassVar[str] = "rollout"
    OFF_POLICY: ClassVar[tuple[str, ...]] = (
        *SamplingBlock.FILTERS,
        *SamplingBlock.PENALTIES,
        "min_tokens",
        "kv_cache_dtype",
        "weight_dtype",
    )
    """The settings that draw tokens from other probabilities than the model's own at the temperature."""

    n_generations: int = 8
    """The number of completions per prompt: the group that a completion's reward is compared with; at least 2."""
    max_new_tokens: int = 512
    temperature: float = 1.0
    """The logits are divided by this before a token is drawn; it must be more than 0, or all completions of a prompt
    would be the same."""

    max_attempts: int = 1
    """Sample further questions, up to so many times in all, in place of those whose answers all have the same reward
    (dynamic sampling, DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2); 1: keep them, though
    nothing can be learned from them."""
    filter_by: str | None = None
    """The component of the reward that decides which questions those are, so that answers which are all wrong count as
    equal though their lengths are rewarded differently (the paper's equation 11); null: the weighted sum of the
    components that judge whether an answer is right, which ``overlong``, ``length`` and ``format`` do not."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(
                f"rollout.max_attempts is {self.max_attempts}; it must be at least 1. Use 1 for no dynamic sampling."
            )
        if self.filter_by is not None and self.max_attempts == 1:
            raise ConfigError(
                f"rollout.filter_by is {self.filter_by} and rollout.max_attempts is 1: it would do nothing. Set "
                "rollout.max_attempts to more than 1, or remove rollout.filter_by."
            )
        if self.n_generations < 2:
            raise ConfigError(
                f"rollout.n_generations is {self.n_generations}; an answer is judged against the others to the same "
                "prompt, so it must be at least 2. The usual is 8."
            )
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature is {self.temperature}; it must be more than 0, or all answers to a prompt would "
                "be the same and nothing could be learned. The usual is 1."
            )
        self.check_sampling()

    def check_policy(self, importance_cap: float | None) -> None:
        """Check that the policy that learns is the one that is sampled, or that the difference is corrected for.

        Args:
            importance_cap: The setting of the loss.

        Raises:
            ConfigError: Answers come from other probabilities, and nothing corrects for that.
        """
        for name in self.OFF_POLICY:
            if self.is_set(name) and importance_cap is None:
                raise ConfigError(
                    f"rollout.{name} is {getattr(self, name)} and importance_cap is null: answers are then not drawn "
                    "with the model's own probabilities at the temperature, which are what learns, and have to be "
                    "corrected for. Set importance_cap to 2 and use_rollout_logprobs to false, or leave "
                    f"rollout.{name} out."
                )
