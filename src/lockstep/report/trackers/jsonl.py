"""Metrics as JSON lines."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.report.jsonl import append_jsonl
from lockstep.report.rows import TableRow
from lockstep.report.trackers.base import Tracker, TrackerConfig, plain


class JsonlTracker:
    """Appends ``{"step": …, "time": …, **metrics}`` to a file of JSON lines.

    Rows are not written: the callback itself keeps every row in ``samples.jsonl``, whatever the tracker.

    Args:
        path: The local file.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        ...     lockstep.report.JsonlTracker(file.name).log({"loss": 2.5}, step=1)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Append one line. Its ``time`` is in seconds since the epoch."""
        values = {name: plain(value) for name, value in metrics.items()}
        append_jsonl(self.path, [{"step": int(step), "time": round(time.time(), 3)} | values])

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Do nothing: rows are in ``samples.jsonl``."""

    def finish(self) -> None:
        """Do nothing: the system has each line when ``log`` returns."""


@TrackerConfig.register_subclass("jsonl")
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlTrackerConfig(TrackerConfig):
    """JSON lines in ``metrics.jsonl`` below the run's directory."""

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker, see ``TrackerConfig.build``."""
        return JsonlTracker(Path(run_dir) / "metrics.jsonl")
