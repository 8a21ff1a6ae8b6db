"""Rewards: functions of an answer and its question, one file per kind."""

from lockstep.training.grpo.rewards.config import Reward, RewardConfig, check_rewards, labels
from lockstep.training.grpo.rewards.exact_match import ExactMatchReward
from lockstep.training.grpo.rewards.format import FormatReward
from lockstep.training.grpo.rewards.function import FunctionReward
from lockstep.training.grpo.rewards.gsm8k import Gsm8kReward
from lockstep.training.grpo.rewards.length import LengthReward
from lockstep.training.grpo.rewards.overlong import OverlongReward
from lockstep.training.grpo.rewards.regex import RegexReward

__all__ = [
    "ExactMatchReward",
    "FormatReward",
    "FunctionReward",
    "Gsm8kReward",
    "LengthReward",
    "OverlongReward",
    "RegexReward",
    "Reward",
    "RewardConfig",
    "check_rewards",
    "labels",
]
