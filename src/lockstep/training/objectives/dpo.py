"""DPO: log-ratios to a reference model as rewards."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from lockstep.errors import ConfigError, check_at_least
from lockstep.training.objectives.preference import PairLogprobs, PairLosses, PreferenceObjective, SmoothedPairs


@PreferenceObjective.register_subclass("dpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoConfig(SmoothedPairs):
    r"""DPO (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7): :math:`-\log\sigma(h)`, where
    :math:`h` is the difference of the rewards :math:`\beta\log(\pi(y|x)/\pi_{ref}(y|x))` of the two responses.
    """

    NEEDS_REFERENCE: ClassVar[bool] = True

    beta: float = 0.1
    """Scale of the reward; the larger, the closer the model stays to the reference."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    r"""``sigmoid``: DPO. ``ipo``: :math:`(h/\beta - 1/(2\beta))^2` (Azar et al. 2023,
    https://arxiv.org/abs/2310.12036, equation 17)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "beta", fix=". The paper uses 0.1 and 0.5.", above=True)
        self.check_pairs()
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing} and loss is {self.loss}, which has none: it would do "
                "nothing. Remove it, or use loss: sigmoid."
            )

    def losses(self, pairs: PairLogprobs) -> PairLosses:
        """See `PreferenceObjective.losses`."""
        assert pairs.reference is not None, "NEEDS_REFERENCE"
        reward = self.beta * (pairs.policy - pairs.reference)
        margin = reward[:, 0] - reward[:, 1]
        if self.loss == "ipo":
            return self.with_sft(pairs, jnp.square((margin - 0.5) / self.beta), reward)
        return self.smoothed(pairs, margin, reward)
