"""GRPO: questions, rollouts, rewards and the batches that are made of them."""

from lockstep.training.rl.config import GrpoRunFields
from lockstep.training.rl.questions import Questions, iter_questions, load_questions
from lockstep.training.rl.rewarding import Rewarder, Rewards
from lockstep.training.rl.rewards import RewardConfig
from lockstep.training.rl.rollout import Rollout
from lockstep.training.rl.rollout_report import ROLLOUTS_FILE
from lockstep.training.rl.rollouts import Rollouts, make_rewarder

__all__ = [
    "GrpoRunFields",
    "Questions",
    "ROLLOUTS_FILE",
    "RewardConfig",
    "Rewarder",
    "Rewards",
    "Rollout",
    "Rollouts",
    "iter_questions",
    "load_questions",
    "make_rewarder",
]
