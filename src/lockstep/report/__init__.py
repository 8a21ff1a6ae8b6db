"""What a round leaves behind: rows, files, trackers."""

from lockstep.report.jsonl import append_jsonl, read_jsonl
from lockstep.report.rows import COLUMNS, Row, metric_names
from lockstep.report.trackers import (
    CompositeTracker,
    JsonlTracker,
    JsonlTrackerConfig,
    NoopTracker,
    NoopTrackerConfig,
    Tracker,
    TrackerChoice,
    TrackerConfig,
    WandbTracker,
    WandbTrackerConfig,
    build_tracker,
)

__all__ = [
    "COLUMNS",
    "CompositeTracker",
    "JsonlTracker",
    "JsonlTrackerConfig",
    "NoopTracker",
    "NoopTrackerConfig",
    "Row",
    "Tracker",
    "TrackerChoice",
    "TrackerConfig",
    "WandbTracker",
    "WandbTrackerConfig",
    "append_jsonl",
    "build_tracker",
    "metric_names",
    "read_jsonl",
]
