"""Rewards: functions of an answer and its question, one file per kind."""

from lockstep.training.rl.rewards.config import Reward, RewardConfig, check_rewards, labels
from lockstep.training.rl.rewards.exact_match import ExactMatchReward
from lockstep.training.rl.rewards.format import FormatReward
from lockstep.training.rl.rewards.function import FunctionReward
from lockstep.training.rl.rewards.gsm8k import Gsm8kReward
from lockstep.training.rl.rewards.length import LengthReward
from lockstep.training.rl.rewards.overlong import OverlongReward
from lockstep.training.rl.rewards.regex import RegexReward

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
