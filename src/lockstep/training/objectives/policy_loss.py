"""Losses of answers that were sampled and rewarded, by the names of `GrpoFields.loss`."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.plugins import load_object

LEAST_SPREAD: Final = 1e-6
"""Rewards of a group whose largest and smallest differ by no more are equal: nothing can be learned from them. Equal
ones in float32 are up to 1e-7 apart."""


def differ(rewards: Float[np.ndarray, "prompt completion"]) -> Bool[np.ndarray, " prompt"]:
    """Return whether the rewards of the answers to each prompt differ, by more than `LEAST_SPREAD`."""
    spread: Bool[np.ndarray, " prompt"] = np.ptp(rewards, axis=1) > LEAST_SPREAD
    return spread


def group_advantages(
    rewards: Float[np.ndarray, "prompt completion"], *, scale: bool = True, ddof: int = 1, epsilon: float = 1e-4
) -> Float[np.ndarray, "prompt completion"]:
    """Return each answer's reward less the mean of those of its prompt, divided by their standard deviation.

    This is the group-relative advantage of section 4.1.2 of GRPO's paper (arXiv 2402.03300), with an epsilon as in TRL
    and verl.

    Args:
        ddof: What the denominator of the deviation is less than the number of answers.

    Returns:
        float32; 0 where the answers to a prompt have equal rewards (`differ`).
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    divisor = rewards.std(axis=1, keepdims=True, ddof=ddof) + epsilon if scale else np.ones_like(centred)
    where = np.broadcast_to(differ(rewards)[:, None], centred.shape)
    return np.divide(centred, divisor, out=np.zeros_like(centred), where=where).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoFields:
    """Settings of the loss of sampled answers."""

    loss: str = "grpo"
    """``grpo``, ``dr_grpo``, ``dapo``, ``gspo``, ``cispo``, ``rloo``, ``reinforce_plus_plus``,
    ``reinforce_plus_plus_baseline`` (docs/grpo.md has their papers), or ``my_module:MyLoss``, a subclass of
    `lockstep.training.PolicyLoss` of your own."""
    clip_epsilon: float = 0.2
    """The ratio of new to old probability counts down to ``1 - clip_epsilon``, and up to ``1 + clip_epsilon`` where
    ``clip_epsilon_high`` is null. GSPO's paper uses 3e-4."""
    clip_epsilon_high: float | None = None
    """The ratio counts up to ``1 +`` this ("clip-higher"; DAPO's paper uses 0.28, GSPO's 4e-4); null: as
    ``clip_epsilon``."""
    dual_clip: float | None = None
    """The loss of a token with a negative advantage is at most this times the advantage's size, however large the ratio
    (Ye et al. 2019, https://arxiv.org/abs/1912.09729; 3 is usual); null: no such limit."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference model, the model as it was before the first step; 0: there is no
    reference model."""
    kl_in_reward: bool = False
    """Whether the divergence of an answer, the sum of those of its tokens, is taken from its reward before advantages
    are made of it (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 2); false: that of each token is a
    part of its loss, as in GRPO's paper. It is never both."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """The estimator of the divergence from the sampled tokens (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    ``k1`` the log-ratio (in a loss its gradient has the mean 0: it measures, it does not pull), ``k2`` half its square,
    ``k3`` unbiased and never negative; null: ``k3`` in the loss, as in GRPO's paper, ``k1`` in the reward, as in
    Ouyang et al."""
    entropy_coefficient: float = 0.0
    """Weight of the policy's entropy, which is taken from the loss (Mnih et al. 2016,
    https://arxiv.org/abs/1602.01783, section 4): the mean that ``train/entropy`` shows, of the whole distribution of
    each token; 0: none. 0.001 to 0.01 are usual."""
    teacher_coefficient: float = 0.0
    """Weight of what ``teacher`` says of each token, which is added to its advantage; 0: there is no teacher."""
    use_rollout_logprobs: bool = True
    """Whether the old probability in the ratio is that of the engine which sampled; false: the trainer's own, computed
    once more before the first update of a rollout (where there is one update, in the update itself)."""
    advantage_ddof: Literal[0, 1] = 1
    """The denominator of the variance that advantages are scaled with is ``n_generations`` less this: 1, as in TRL and
    verl, or 0."""
    advantage_epsilon: float = 1e-4
    """Added to that deviation, so that rewards which hardly differ hardly count; TRL has 1e-4, verl 1e-6."""
    importance_cap: float | None = None
    """Multiply the loss of a token by the trainer's old probability divided by the one that it was drawn with, at most
    this (truncated importance sampling, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; 2 is usual). It
    corrects for the engine's rounding, and for filters and penalties (docs/grpo.md). Null: no correction. Needs
    ``use_rollout_logprobs: false``."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether that quotient is of a token, or of its whole answer."""
    importance_above: Literal["cap", "mask"] = "cap"
    """A quotient above ``importance_cap``: ``cap`` takes the cap, ``mask`` learns nothing from the
    token, or from the answer."""

    @property
    def clip_high(self) -> float:
        """The distance from 1 up to which a larger ratio counts."""
        return self.clip_epsilon if self.clip_epsilon_high is None else self.clip_epsilon_high

    def check_loss(self) -> None:
        """Check the settings."""
        check_fields(self)
        check_at_least(self, 0, "clip_epsilon", fix=". The paper's is 0.2.", above=True, below=1)
        high = ". DAPO's paper uses 0.28; null is as clip_epsilon."
        check_at_least(self, 0, "clip_epsilon_high", fix=high, above=True)
        check_at_least(self, 0, "kl_coefficient", fix=". The paper uses 0.04; 0 is none.")
        check_at_least(self, 0, "entropy_coefficient", fix=". 0.001 to 0.01 are usual; 0 is none.")
        check_at_least(self, 0, "teacher_coefficient", fix=". 1 is usual; 0 is no teacher.")
        for name in policy_loss(self.loss).UNUSED:
            if getattr(self, name) != getattr(GrpoFields, name):
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and loss is {self.loss}, which does not use it: it would do "
                    f"nothing. Remove {name}, or use another loss."
                )
        check_at_least(self, 1, "dual_clip", fix=". 3 is usual; null is no limit.", above=True)
        check_at_least(self, 0, "advantage_epsilon", fix=". TRL's is 1e-4.", below=1)
        for name in ("kl_estimator", "kl_in_reward"):
            if getattr(self, name) and not self.kl_coefficient:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and kl_coefficient is 0: it would do nothing. Set kl_coefficient "
                    f"to more than 0, or remove {name}."
                )
        less = ", or answers that were sampled with the trainer's own probabilities would count less. 2 is usual; "
        check_at_least(self, 1, "importance_cap", fix=f"{less}null is none.")
        for name in ("importance_level", "importance_above"):
            if self.importance_cap is None and getattr(self, name) != getattr(GrpoFields, name):
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and importance_cap is null: it would do nothing. Set "
                    f"importance_cap to 2, or remove {name}."
                )
        if self.importance_cap is not None and self.use_rollout_logprobs:
            raise ConfigError(
                f"importance_cap is {self.importance_cap} and use_rollout_logprobs is true: the ratio then holds the "
                "difference between engine and trainer already. Set use_rollout_logprobs to false, or importance_cap "
                "to null."
            )


class PolicyLoss:
    """GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3), from which other losses depart.

    One of your own is a subclass, named ``loss: my_module:MyLoss``.

    Example:
        >>> class Untrimmed(lockstep.training.PolicyLoss):
        ...     def token_losses(self, ratio, logprobs, advantage, config):
        ...         return -ratio * advantage, jnp.zeros_like(ratio, bool)
        ...
        >>> import jax.numpy as jnp
        >>> losses, clipped = Untrimmed().token_losses(jnp.full((1, 2), 3.0), None, jnp.ones((1, 1)), None)
        >>> losses.tolist()
        [[-3.0, -3.0]]
    """

    UNUSED: ClassVar[tuple[str, ...]] = ()
    """Settings of `GrpoFields` that would have no effect; they are refused."""
    MEAN_OVER: ClassVar[Literal["answers", "tokens"]] = "answers"
    """The units that count the same in the loss of a batch, and in its metrics."""

    def warning(self, config: GrpoFields) -> str | None:
        """Return what the log says once about settings that hardly make sense; None for nothing."""
        return None

    def advantages(
        self, rewards: Float[np.ndarray, "prompt completion"], config: GrpoFields
    ) -> Float[np.ndarray, "prompt completion"]:
        """Return the advantage of each answer of a rollout: `group_advantages`."""
        return group_advantages(rewards, ddof=config.advantage_ddof, epsilon=config.advantage_epsilon)

    def log_ratio(
        self, log_ratio: Float[Array, "row target"], mask: Bool[Array, "row target"]
    ) -> Float[Array, "row target"]:
        """Return the log-ratio of new to old probability that each token counts with; here its own.

        Args:
            log_ratio: That of each token, 0 outside of the mask.
            mask: True for the tokens of the answers.
        """
        return log_ratio

    def token_losses(
        self,
        ratio: Float[Array, "row target"],
        logprobs: Float[Array, "row target"],
        advantage: Float[Array, "row _"],
        config: GrpoFields,
    ) -> tuple[Float[Array, "row target"], Bool[Array, "row target"]]:
        r"""Return the loss of each token, and whether clipping takes its gradient away.

        :math:`-\min(r A, \mathrm{clip}(r, 1-\epsilon, 1+\epsilon_{high}) A)`; with ``dual_clip`` at most
        :math:`-c A` where :math:`A < 0` (Ye et al. 2019, https://arxiv.org/abs/1912.09729, equation 5).
        """
        gain = ratio * advantage
        kept = jnp.minimum(gain, jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_high) * advantage)
        if config.dual_clip is not None:
            kept = jnp.where(advantage < 0, jnp.maximum(kept, config.dual_clip * advantage), kept)
        return -kept, kept != gain

    def shares(self, mask: Bool[Array, "row target"]) -> Float[Array, "row target"]:
        """Return what each token counts in the sum that is divided by the number of ``MEAN_OVER``."""
        return mean_shares(mask, self.MEAN_OVER)[0]


def mean_shares(
    mask: Bool[Array, "row target"], over: Literal["answers", "tokens"]
) -> tuple[Float[Array, "row target"], Float[Array, ""]]:
    """Return the share of each token in a mean, and the divisor of the sums, which is never 0."""
    counts = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    # The loss of a batch without answers is 0, not 0 / 0; beside a count of 1 this is lost in float32.
    if over == "tokens":
        return mask.astype(jnp.float32), jnp.maximum(jnp.sum(counts), 1e-30)
    answers = jnp.maximum(jnp.sum(counts > 0, dtype=jnp.float32), 1e-30)
    return jnp.where(mask, 1.0 / jnp.maximum(counts, 1)[:, None], 0.0), answers


class DrGrpo(PolicyLoss):
    """Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2: no division by length or by deviation."""

    UNUSED = ("advantage_ddof", "advantage_epsilon")

    def advantages(self, rewards: Any, config: GrpoFields) -> Float[np.ndarray, "prompt completion"]:
        """Return the rewards less the mean of those of their prompt."""
        return group_advantages(rewards, scale=False)

    def shares(self, mask: Bool[Array, "row target"]) -> Float[Array, "row target"]:
        """Return one share for all tokens: 1 by the number of targets of a row."""
        return mask / jnp.float32(mask.shape[1])


class Dapo(PolicyLoss):
    """Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 8: all tokens count the same."""

    MEAN_OVER = "tokens"


class Gspo(PolicyLoss):
    """Zheng et al. 2025, https://arxiv.org/abs/2507.18071, equation 7: the geometric mean of an answer's ratios."""

    WIDE: ClassVar = 0.05

    def warning(self, config: GrpoFields) -> str | None:
        """Name a clipping that clips nothing."""
        if config.clip_epsilon < self.WIDE:
            return None
        return (
            f"loss is gspo and clip_epsilon is {config.clip_epsilon:g}, which clips nothing: the ratio of a whole "
            "answer stays within thousandths of 1. GSPO's paper uses clip_epsilon 3e-4 and clip_epsilon_high 4e-4"
        )

    def log_ratio(self, log_ratio: Any, mask: Any) -> Float[Array, "row target"]:
        """Return the mean over the answer for all of its tokens; the gradient reaches all through it."""
        mean = jnp.sum(log_ratio, axis=-1, keepdims=True) / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
        return jnp.broadcast_to(mean, mask.shape)


class Cispo(Dapo):
    """MiniMax 2025, https://arxiv.org/abs/2506.13585, equations 4 and 5: no token loses its gradient.

    The weight of a token is its ratio, at most ``1 + clip_epsilon_high``, through which no gradient goes.
    """

    UNUSED = ("clip_epsilon", "dual_clip")

    def token_losses(self, ratio: Any, logprobs: Any, advantage: Any, config: GrpoFields) -> tuple[Any, Any]:
        """Return the negative weight times advantage times log-probability."""
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, 1 + config.clip_high))
        return -weight * advantage * logprobs, jnp.zeros_like(ratio, bool)


class Rloo(PolicyLoss):
    """Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740: an answer is one action.

    The baseline is the mean reward of the others (section 3.3); the ratio is that of the whole answer, clipped as in
    TRL's ``RLOOTrainer``.
    """

    UNUSED = ("advantage_ddof", "advantage_epsilon")

    def advantages(self, rewards: Any, config: GrpoFields) -> Float[np.ndarray, "prompt completion"]:
        """Return each reward less the mean of the others of its prompt."""
        size = rewards.shape[1]
        return group_advantages(rewards, scale=False) * np.float32(size / (size - 1))

    def log_ratio(self, log_ratio: Any, mask: Any) -> Float[Array, "row target"]:
        """Return the sum over the answer for all of its tokens."""
        return jnp.broadcast_to(jnp.sum(log_ratio, axis=-1, keepdims=True), mask.shape)


class ReinforcePlusPlus(Dapo):
    """REINFORCE++ (Hu et al. 2025, https://arxiv.org/abs/2501.03262): advantages normalised over the whole rollout."""

    def advantages(self, rewards: Any, config: GrpoFields) -> Float[np.ndarray, "prompt completion"]:
        """Return the rewards less their mean, divided by their deviation, both of all answers."""
        rewards = np.asarray(rewards, np.float64)
        return group_advantages(
            rewards.reshape(1, -1), ddof=config.advantage_ddof, epsilon=config.advantage_epsilon
        ).reshape(rewards.shape)


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """The same with the mean reward of the answers to a prompt as its baseline."""

    def advantages(self, rewards: Any, config: GrpoFields) -> Float[np.ndarray, "prompt completion"]:
        """Return the rewards less the mean of those of their prompt, divided by the deviation of all."""
        return super().advantages(group_advantages(rewards, scale=False), config)


LOSSES: Final[dict[str, Callable[[], PolicyLoss]]] = {
    "grpo": PolicyLoss,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "rloo": Rloo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
}
"""The losses that ship, by name."""


def policy_loss(name: Any) -> PolicyLoss:
    """Return the loss of a name.

    Raises:
        ConfigError: There is none.
    """
    if name in LOSSES:
        return LOSSES[name]()
    if not (isinstance(name, str) and ":" in name):
        raise ConfigError(
            f"loss is {name}; it must be one of {', '.join(LOSSES)}, or my_module:MyLoss for a subclass of "
            "lockstep.training.PolicyLoss of your own."
        )
    own = load_object(name, "loss", kind=type)
    if not issubclass(own, PolicyLoss):
        raise ConfigError(f"loss {name!r} is not a subclass of PolicyLoss. Derive it from that class.")
    loss: PolicyLoss = own()
    return loss
