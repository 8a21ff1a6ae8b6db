"""CPO: preferences without a reference model, beside a term that keeps the chosen response probable."""

import dataclasses

from lockstep.errors import check_at_least
from lockstep.training.objectives.preference import (
    PairLogprobs,
    PairLosses,
    PreferenceObjective,
    SmoothedPairs,
)


@PreferenceObjective.register_subclass("cpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CpoConfig(SmoothedPairs):
    r"""CPO (Xu et al. 2024, https://arxiv.org/abs/2401.08417, equations 3 and 4):
    :math:`-\log\sigma(\beta(\log\pi(y_w|x) - \log\pi(y_l|x)))`, plus ``sft_weight`` times the cross entropy of the
    chosen response.
    """

    beta: float = 0.1
    """Scale of the reward, the log-probability of a response."""
    sft_weight: float = 1.0
    """Weight of the mean cross entropy of the tokens of the chosen response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "beta", fix=". The paper uses 0.1.", above=True)
        self.check_pairs()

    def losses(self, pairs: PairLogprobs) -> PairLosses:
        """See `PreferenceObjective.losses`."""
        reward = self.beta * pairs.policy
        return self.smoothed(pairs, reward[:, 0] - reward[:, 1], reward)
