"""GRPO: questions, rollouts, rewards and the batches that are made of them."""

from lockstep.training.rl.config import GrpoRunFields as GrpoRunFields
from lockstep.training.rl.environment import Environment as Environment
from lockstep.training.rl.environment import Reply as Reply
from lockstep.training.rl.openenv_environment import OpenEnvEnvironment as OpenEnvEnvironment
from lockstep.training.rl.questions import Questions as Questions
from lockstep.training.rl.questions import iter_questions as iter_questions
from lockstep.training.rl.questions import load_questions as load_questions
from lockstep.training.rl.rewards import RewardConfig as RewardConfig
from lockstep.training.rl.rollout_log import ROLLOUTS_FILE as ROLLOUTS_FILE
from lockstep.training.rl.rollouts import Rollouts as Rollouts
from lockstep.training.rl.rollouts import make_rewarder as make_rewarder
from lockstep.training.rl.tools import ToolEnvironment as ToolEnvironment
from lockstep.training.rl.verifiers_environment import VerifiersEnvironment as VerifiersEnvironment
