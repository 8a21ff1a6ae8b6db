"""SimPO: mean log-probabilities as rewards, without a reference model."""

import dataclasses

from lockstep.errors import check_at_least
from lockstep.training.objectives.preference import PairLogprobs, PairLosses, PreferenceObjective, SmoothedPairs


@PreferenceObjective.register_subclass("simpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SimpoConfig(SmoothedPairs):
    r"""SimPO (Meng, Xia & Chen 2024, https://arxiv.org/abs/2405.14734, equation 6):
    :math:`-\log\sigma(\beta\,(\bar p_w - \bar p_l) - \gamma)`, with mean log-probabilities.
    """

    beta: float = 2.0
    """Scale of the reward: ``beta`` times the mean log-probability of a response's tokens."""
    gamma_beta_ratio: float = 0.5
    """Target margin ``gamma`` between the rewards, as a fraction of ``beta``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "beta", fix=". The paper uses 2.0 to 10.", above=True)
        check_at_least(self, 0, "gamma_beta_ratio", fix=". The paper uses 0.1 to 0.8.")
        self.check_pairs()

    def losses(self, pairs: PairLogprobs) -> PairLosses:
        """See `PreferenceObjective.losses`."""
        reward = self.beta * pairs.mean
        return self.smoothed(pairs, reward[:, 0] - reward[:, 1] - self.gamma_beta_ratio * self.beta, reward)
