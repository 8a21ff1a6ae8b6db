"""Samples inside Tunix's trainers, and our engine as the rollout of its RL learners (docs/tunix.md)."""

from lockstep.tunix.hooks import sample_hooks as sample_hooks
from lockstep.tunix.rollout import Rollout as Rollout
