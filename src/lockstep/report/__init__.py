"""What a round leaves behind: rows, files, metrics, tables, trackers."""

from lockstep.report.evaluation_fields import EvaluationFields
from lockstep.report.jsonl import append_jsonl, read_jsonl
from lockstep.report.metrics import Metric, exact_match, load_metric, load_metrics, measure, metric_means
from lockstep.report.rows import COLUMNS, SAMPLE_COLUMNS, Row, SampleRow, TableRow, metric_names
from lockstep.report.table import print_table, terminal_table
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
    "EvaluationFields",
    "JsonlTracker",
    "JsonlTrackerConfig",
    "Metric",
    "NoopTracker",
    "NoopTrackerConfig",
    "Row",
    "SampleRow",
    "SAMPLE_COLUMNS",
    "TableRow",
    "Tracker",
    "TrackerChoice",
    "TrackerConfig",
    "WandbTracker",
    "WandbTrackerConfig",
    "append_jsonl",
    "build_tracker",
    "exact_match",
    "load_metric",
    "load_metrics",
    "measure",
    "metric_means",
    "metric_names",
    "print_table",
    "read_jsonl",
    "terminal_table",
]
