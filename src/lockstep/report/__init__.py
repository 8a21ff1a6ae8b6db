"""Rows of completions, and what is made of them: files, metrics, tables, tracked runs."""

from lockstep.report.answers import last_number
from lockstep.report.background import FINISH_S, BackgroundQueue, BackgroundTracker
from lockstep.report.html import make_payload, render_page, write_page
from lockstep.report.inspect_log import write_inspect_log
from lockstep.report.jsonl import append_jsonl, drop_later, read_jsonl, repair_jsonl
from lockstep.report.judge import JUDGE, Judge, JudgeConfig
from lockstep.report.metrics import (
    EvaluationFields,
    Metric,
    check_metrics,
    exact_match,
    load_metric,
    load_metrics,
    measure,
    metric_means,
    pass_rates,
)
from lockstep.report.parquet import check_pyarrow, write_parquet
from lockstep.report.pattern import Pattern
from lockstep.report.rows import COLUMNS, SAMPLE_COLUMNS, Row, SampleRow, TableRow, metric_names
from lockstep.report.saved_rows import RunFiles, find_run
from lockstep.report.table import print_table, terminal_table
from lockstep.report.tail import LineView, PanelView, Tail
from lockstep.report.trackers import (
    MAX_TABLE_ROWS,
    WANDB_RUN,
    CompositeTracker,
    JsonlTracker,
    JsonlTrackerConfig,
    NoopTracker,
    NoopTrackerConfig,
    TensorboardTracker,
    TensorboardTrackerConfig,
    Tracker,
    TrackerChoice,
    TrackerConfig,
    WandbTracker,
    WandbTrackerConfig,
    build_tracker,
    check_trackers,
)

__all__ = [
    "BackgroundQueue",
    "BackgroundTracker",
    "COLUMNS",
    "CompositeTracker",
    "EvaluationFields",
    "FINISH_S",
    "JUDGE",
    "JsonlTracker",
    "JsonlTrackerConfig",
    "LineView",
    "Judge",
    "JudgeConfig",
    "MAX_TABLE_ROWS",
    "Metric",
    "NoopTracker",
    "NoopTrackerConfig",
    "PanelView",
    "Pattern",
    "Row",
    "RunFiles",
    "SampleRow",
    "SAMPLE_COLUMNS",
    "TableRow",
    "Tail",
    "TensorboardTracker",
    "TensorboardTrackerConfig",
    "Tracker",
    "TrackerChoice",
    "TrackerConfig",
    "WANDB_RUN",
    "WandbTracker",
    "WandbTrackerConfig",
    "append_jsonl",
    "drop_later",
    "build_tracker",
    "check_trackers",
    "check_metrics",
    "check_pyarrow",
    "exact_match",
    "find_run",
    "last_number",
    "load_metric",
    "load_metrics",
    "make_payload",
    "measure",
    "metric_means",
    "metric_names",
    "pass_rates",
    "print_table",
    "read_jsonl",
    "render_page",
    "repair_jsonl",
    "terminal_table",
    "write_page",
    "write_inspect_log",
    "write_parquet",
]
