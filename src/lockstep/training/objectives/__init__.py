"""The objectives that training minimises."""

from lockstep.training.objectives.dpo import DpoConfig
from lockstep.training.objectives.grpo import GrpoConfig, GrpoFields, group_advantages, grpo_parts
from lockstep.training.objectives.logprobs import (
    LossFn,
    LossParts,
    OutputLayer,
    lm_loss,
    needs_vocab_blocks,
    target_mask,
    token_logprobs,
)
from lockstep.training.objectives.orpo import OrpoConfig
from lockstep.training.objectives.preference import REFERENCE, PairLogprobs, PairLosses, PreferenceObjective
from lockstep.training.objectives.simpo import SimpoConfig

__all__ = [
    "DpoConfig",
    "GrpoConfig",
    "GrpoFields",
    "LossFn",
    "LossParts",
    "OrpoConfig",
    "OutputLayer",
    "PairLogprobs",
    "PairLosses",
    "PreferenceObjective",
    "REFERENCE",
    "SimpoConfig",
    "group_advantages",
    "grpo_parts",
    "lm_loss",
    "needs_vocab_blocks",
    "target_mask",
    "token_logprobs",
]
