"""GRPO: questions, rollouts, rewards and the batches that are made of them."""

from lockstep.training.grpo.config import GrpoRunFields
from lockstep.training.grpo.questions import Questions, iter_questions, load_questions
from lockstep.training.grpo.rewarding import Rewarder, Rewards
from lockstep.training.grpo.rewards import RewardConfig
from lockstep.training.grpo.rollout import Rollout
from lockstep.training.grpo.rollout_report import ROLLOUTS_FILE
from lockstep.training.grpo.rollouts import Rollouts, make_rewarder

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
