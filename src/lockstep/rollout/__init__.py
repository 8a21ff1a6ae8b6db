"""Answers to learn from: sampled from the model that is being trained."""

from lockstep.rollout.config import RolloutConfig as RolloutConfig
