"""ORPO: supervised fine-tuning on the chosen response with a penalty for the odds of the rejected one."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lockstep.errors import check_at_least
from lockstep.training.objectives.preference import PairLogprobs, PairLosses, PreferenceObjective

LARGEST: Final = -1e-6
"""Mean log-probability above which the odds of a response are those of this one: at 0 they are infinite."""


@PreferenceObjective.register_subclass("orpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OrpoConfig(PreferenceObjective):
    r"""ORPO (Hong, Lee & Thorne 2024, https://arxiv.org/abs/2403.07691, equations 6 and 7):
    :math:`-\bar p_w - \lambda\log\sigma(\log\mathrm{odds}_w - \log\mathrm{odds}_l)`, with mean log-probabilities
    :math:`\bar p` and :math:`\mathrm{odds} = e^{\bar p}/(1 - e^{\bar p})`. There is no reference model.
    """

    beta: float = 0.1
    r"""Weight of the odds-ratio loss, the paper's :math:`\lambda`; rewards are this times the mean log-probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "beta", fix=". The paper uses 0.1 to 1.0.", above=True)

    def losses(self, pairs: PairLogprobs) -> PairLosses:
        """See `PreferenceObjective.losses`."""
        mean = pairs.mean
        odds = _log_odds(mean)
        ratio = odds[:, 0] - odds[:, 1]
        return PairLosses(
            -mean[:, 0] - self.beta * jax.nn.log_sigmoid(ratio),
            self.beta * mean,
            {"nll_loss": -mean[:, 0], "log_odds_ratio": ratio},
        )


def _log_odds(logprob: Float[Array, "row 2"]) -> Float[Array, "row 2"]:
    """Log-odds of a log-probability, in float32 also where the probability is near 0 or 1."""
    logprob = jnp.minimum(logprob, LARGEST)
    return logprob - jnp.log(-jnp.expm1(logprob))
