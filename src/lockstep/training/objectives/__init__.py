"""What is minimised."""

from lockstep.training.objectives.lm import lm_loss, token_logprobs
from lockstep.training.objectives.parts import LossFn, LossParts
from lockstep.training.objectives.simpo import SimpoConfig, simpo_parts

__all__ = ["LossFn", "LossParts", "SimpoConfig", "lm_loss", "simpo_parts", "token_logprobs"]
