"""The objectives that training minimises."""

from lockstep.training.objectives.grpo import GrpoConfig, GrpoFields, group_advantages, grpo_parts
from lockstep.training.objectives.lm import lm_loss, token_logprobs
from lockstep.training.objectives.parts import LossFn, LossParts
from lockstep.training.objectives.simpo import SimpoConfig, simpo_parts

__all__ = [
    "GrpoConfig",
    "GrpoFields",
    "LossFn",
    "LossParts",
    "SimpoConfig",
    "group_advantages",
    "grpo_parts",
    "lm_loss",
    "simpo_parts",
    "token_logprobs",
]
