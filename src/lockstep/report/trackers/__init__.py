"""Trackers: where metrics and tables of samples go. Only the leader has one that writes; none of them uses jax."""

from lockstep.report.trackers.base import CompositeTracker as CompositeTracker
from lockstep.report.trackers.base import JsonlTracker as JsonlTracker
from lockstep.report.trackers.base import JsonlTrackerConfig as JsonlTrackerConfig
from lockstep.report.trackers.base import NoopTracker as NoopTracker
from lockstep.report.trackers.base import NoopTrackerConfig as NoopTrackerConfig
from lockstep.report.trackers.base import Tracker as Tracker
from lockstep.report.trackers.base import TrackerChoice as TrackerChoice
from lockstep.report.trackers.base import TrackerConfig as TrackerConfig
from lockstep.report.trackers.base import alert_tracker as alert_tracker
from lockstep.report.trackers.base import build_tracker as build_tracker
from lockstep.report.trackers.base import check_trackers as check_trackers
from lockstep.report.trackers.base import rewind_tracker as rewind_tracker
from lockstep.report.trackers.tensorboard import TensorboardTracker as TensorboardTracker
from lockstep.report.trackers.tensorboard import TensorboardTrackerConfig as TensorboardTrackerConfig
from lockstep.report.trackers.wandb import MAX_TABLE_ROWS as MAX_TABLE_ROWS
from lockstep.report.trackers.wandb import WANDB_RUN as WANDB_RUN
from lockstep.report.trackers.wandb import WandbTracker as WandbTracker
from lockstep.report.trackers.wandb import WandbTrackerConfig as WandbTrackerConfig
