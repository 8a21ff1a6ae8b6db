"""Trackers: where metrics and tables of samples go. Only the leader has one that writes; none of them uses jax."""

from lockstep.report.trackers.base import (
    CompositeTracker,
    JsonlTracker,
    JsonlTrackerConfig,
    NoopTracker,
    NoopTrackerConfig,
    Tracker,
    TrackerChoice,
    TrackerConfig,
    build_tracker,
    check_trackers,
)
from lockstep.report.trackers.tensorboard import TensorboardTracker, TensorboardTrackerConfig
from lockstep.report.trackers.wandb import MAX_TABLE_ROWS, WANDB_RUN, WandbTracker, WandbTrackerConfig

__all__ = [
    "MAX_TABLE_ROWS",
    "WANDB_RUN",
    "CompositeTracker",
    "JsonlTracker",
    "JsonlTrackerConfig",
    "NoopTracker",
    "NoopTrackerConfig",
    "TensorboardTracker",
    "TensorboardTrackerConfig",
    "Tracker",
    "TrackerChoice",
    "TrackerConfig",
    "WandbTracker",
    "WandbTrackerConfig",
    "build_tracker",
    "check_trackers",
]
