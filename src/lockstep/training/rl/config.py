"""Settings of reinforcement learning: how to sample, to reward, and to learn."""

import dataclasses
from typing import ClassVar, Literal

from lockstep.config_fields import check_fields
from lockstep.engine import SamplingBlock
from lockstep.errors import ConfigError, check_at_least
from lockstep.report import AlarmsConfig
from lockstep.training.rl.environment import Environment
from lockstep.training.rl.rewards import Gsm8kReward, RewardConfig, check_rewards, labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingBlock):
    """Sampling before each step, from the very weights that the step then changes."""

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

    replay_routing: bool = False
    """Whether the update takes the experts that the engine chose for each token, and learns their weights (R3, Ma et
    al. 2025, https://arxiv.org/abs/2510.11370); false: the model's own choice, see ``train/routing_gap``."""

    health: bool = True
    """Look at the health of every answer (docs/health.md): ``rollout/health/STATE`` is the share in a state."""
    alarms: AlarmsConfig = dataclasses.field(default_factory=AlarmsConfig)
    """When a state of answers is an alarm, and what becomes of it (docs/health.md)."""

    def __post_init__(self) -> None:
        check_fields(self, "rollout.")
        check_at_least(self, 1, "max_attempts", block="rollout.", fix=". Use 1 for no dynamic sampling.")
        self.alarms.check_health(self.health, "rollout")
        if self.filter_by is not None and self.max_attempts == 1:
            raise ConfigError(
                f"rollout.filter_by is {self.filter_by} and rollout.max_attempts is 1: it would do nothing. Set "
                "rollout.max_attempts to more than 1, or remove rollout.filter_by."
            )
        fix = ": an answer is judged against the others to the same prompt. The usual is 8."
        check_at_least(self, 2, "n_generations", block="rollout.", fix=fix)
        same = ", or all answers to a prompt would be the same and nothing could be learned. The usual is 1."
        check_at_least(self, 0, "temperature", block="rollout.", fix=same, above=True)
        self.check_sampling()

    def check_policy(self, importance_cap: float | None) -> None:
        """Check that the policy that learns is the one that is sampled, or that the difference is corrected for.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoRunFields:
    """Settings of rollouts, rewards and updates."""

    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    """The sampling of answers."""
    num_iterations: int = 1
    """The number of times that each answer of a rollout is learned from."""
    minibatches: int = 1
    """The number of optimizer steps that the answers of a rollout are split over: a rollout has ``train_batch_size``
    times as many answers, and is sampled once in ``num_iterations`` times as many steps."""
    sampling: Literal["uniform", "by_solve_rate"] = "uniform"
    """Which questions a rollout has: ``uniform``, each once per epoch; ``by_solve_rate``, those more often to which
    about half of the answers were right so far (docs/grpo.md)."""
    rollout_ahead: int = 0
    """1: the answers of the next rollout are sampled before the updates of this one, with the model of that moment, so
    that their rewards are computed while the devices work; they are one rollout older than the model that learns from
    them, which ``importance_cap`` corrects. Worth it where rewards are slow. 0: sampled by the model that learns."""
    rewards: list[RewardConfig] = dataclasses.field(default_factory=lambda: [Gsm8kReward()])
    """The components of the reward, which is their weighted sum; without this key gsm8k alone."""
    environment: Environment | None = None
    """The environment that the model talks to, in several turns, and that rewards it in place of ``rewards``: ``type:
    retry``, or ``my_module:MyEnvironment``, and its fields (docs/grpo.md); null: each question is answered once."""
    reward_timeout_s: float = 30.0
    """Seconds that rewards may take after the last answer of a rollout, with ``rollout_ahead`` after that of the next;
    what is late has the component's default."""
    reward_workers: int = 8
    """Threads per host that compute the rewards of a rollout; each runs the coroutines of ``async`` rewards in a loop
    of its own."""
    mask_truncated: bool = False
    """Whether nothing is learned from answers that were cut at ``rollout.max_new_tokens`` (overlong filtering, DAPO, Yu
    et al. 2025, https://arxiv.org/abs/2503.14476, section 3.4); their rewards count for the others of their group."""
    answers_shown: int = 4
    """Answers of a rollout in the table ``rollout/answers`` and in ``rollouts.jsonl``: the best and the worst."""

    @property
    def updates(self) -> int:
        """The number of optimizer steps per rollout."""
        return self.num_iterations * self.minibatches

    def check_run(
        self, batch_size: int, hosts_wait_s: float, importance_cap: float | None, *, taught: bool = False
    ) -> None:
        """Check the settings.

        Args:
            taught: Whether a teacher is learned from.

        Raises:
            ConfigError: A value is out of its range, values do not go together, or the batch is not made of whole
                groups.
        """
        check_at_least(self, 1, "num_iterations", "minibatches", "reward_workers")
        check_at_least(self, 0, "answers_shown")
        check_at_least(self, 0, "reward_timeout_s", fix=" seconds. The default is 30.", above=True)
        if self.reward_timeout_s >= hosts_wait_s:
            raise ConfigError(
                f"reward_timeout_s is {self.reward_timeout_s:g} and hosts wait {hosts_wait_s:g} s for each other "
                "(trainer.distributed.timeout_s): one whose rewards are late would be taken for dead. Lower "
                "reward_timeout_s, or raise trainer.distributed.timeout_s."
            )
        if self.mask_truncated and self.rollout.ignore_eos and not self.rollout.stop:
            raise ConfigError(
                "mask_truncated is true, rollout.ignore_eos is true and rollout.stop is empty: every answer would be "
                "cut at rollout.max_new_tokens, and nothing learned. Set one of the two to false, or give rollout.stop."
            )
        self._check_ahead(importance_cap)
        self._check_environment(hosts_wait_s)
        self.rollout.check_policy(importance_cap)
        check_rewards(self.rewards, taught=taught)
        if self.rollout.filter_by is not None and self.rollout.filter_by not in labels(self.rewards):
            raise ConfigError(
                f"rollout.filter_by is {self.rollout.filter_by!r}; it must be one of the rewards "
                f"{', '.join(labels(self.rewards))}. Correct it, or use null."
            )
        group = self.rollout.n_generations
        if batch_size % group:
            raise ConfigError(
                f"trainer.train_batch_size is {batch_size} answers and rollout.n_generations is {group}; a batch is "
                f"made of whole groups. Use a multiple of {group}, e.g. {max(1, batch_size // group) * group}."
            )

    def _check_environment(self, hosts_wait_s: float) -> None:
        if self.environment is None:
            return
        if self.rewards != [Gsm8kReward()]:
            raise ConfigError("environment and rewards are both given; an environment rewards itself. Remove rewards.")
        for name, value, fix in (
            ("rollout_ahead", self.rollout_ahead, "it has rewarded by the time its answers are there. Set it to 0"),
            ("rollout.drafts", self.rollout.drafts, "drafts guess the one answer to a question. Set it to none"),
            ("rollout.filter_by", self.rollout.filter_by, "there is one reward. Remove it"),
        ):
            if value not in (0, "none", None):
                raise ConfigError(f"{name} is {value} and an environment is given: {fix}.")
        if self.environment.timeout_s >= hosts_wait_s:
            raise ConfigError(
                f"environment.timeout_s is {self.environment.timeout_s:g} and hosts wait {hosts_wait_s:g} s for each "
                "other (trainer.distributed.timeout_s). Lower environment.timeout_s, or raise "
                "trainer.distributed.timeout_s."
            )

    def _check_ahead(self, importance_cap: float | None) -> None:
        if self.rollout_ahead not in (0, 1):
            raise ConfigError(
                f"rollout_ahead is {self.rollout_ahead}; it must be 0 (answers of the model that learns from them) or "
                "1 (of the model one rollout before)."
            )
        if self.rollout_ahead and importance_cap is None:
            raise ConfigError(
                "rollout_ahead is 1 and importance_cap is null: answers of an older model would be learned from as if "
                "they were of this one. Set importance_cap to 2 and use_rollout_logprobs to false, or rollout_ahead "
                "to 0."
            )
        if self.rollout_ahead and self.rollout.max_attempts > 1:
            raise ConfigError(
                f"rollout_ahead is 1 and rollout.max_attempts is {self.rollout.max_attempts}: whether further "
                "questions are sampled depends on the rewards, which would have to be waited for. Set rollout_ahead "
                "to 0, or rollout.max_attempts to 1."
            )
