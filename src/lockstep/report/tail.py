"""The newest rows and metrics of a run that goes on, and what is new since the last look."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.report.follow import FollowedFile
from lockstep.report.jsonl import numbered_records
from lockstep.report.run_files import RunFiles, find_run
from lockstep.report.saved_rows import SavedRow, parse_row, read_rows

TREND: Final = 64
"""The last values of a metric that are kept, for its trend."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """What a run logged at once.

    Args:
        step: The number of training steps completed.
        values: The values by their names, as the file has them.
    """

    step: int
    values: dict[str, float | str]


class Tail:
    """Follows the files of a run.

    Args:
        given: The directory of a run or a file of rows, as for `find_run`.
        must_be_there: Whether a run without any file is an error, and not one to wait for.

    Raises:
        ConfigError: There is no such run.
    """

    def __init__(self, given: str, *, must_be_there: bool = False) -> None:
        self._given = given
        self._files: dict[Path, FollowedFile] = {}
        self.name = find_run(given).name
        self.axis: str = "step"
        self.newest: list[SavedRow] = []
        """The rows of the step that was sampled last."""
        self.metrics: dict[str, tuple[int, float | str]] = {}
        """The newest value of each metric with its step, in order of first appearance."""
        self.trends: dict[str, collections.deque[float]] = {}
        """The last values of each metric that is a number."""
        self.new_rows: list[SavedRow] = []
        """The rows that the last look found."""
        self.new_metrics: list[MetricsRecord] = []
        """What the last look found in the files of metrics."""
        self.taken_back = 0
        """Lines that the last look did not find any more: the run went back to a checkpoint."""
        if must_be_there:
            run = find_run(given)
            if not run.rows and not run.metrics:
                raise ConfigError(
                    f"{given} has no samples.jsonl, rollouts.jsonl or metrics.jsonl. Name the directory of a run, or "
                    "leave out --no-follow to wait for its first round of samples."
                )

    def look(self, *, at_end: bool = False) -> bool:
        """Read what is new.

        Args:
            at_end: Whether nobody writes any more, so that a last line may lack its newline.

        Returns:
            Whether anything is.

        Raises:
            LockstepError: A line is not a record; the message has file and line.
        """
        run = find_run(self._given)
        self.new_rows, self.new_metrics, self.taken_back = [], [], 0
        for path in (*run.rows, *run.metrics):
            news = self._files.setdefault(path, FollowedFile(path)).look(at_end=at_end)
            self.taken_back += news.taken_back
            if path in run.rows:
                self.new_rows += [parse_row(record, place) for place, record in news.records]
            else:
                self.new_metrics += [found for _, record in news.records if (found := metrics_record(record))]
        if self.taken_back:
            self._read_anew(run)
        else:
            self._add(self.new_rows, self.new_metrics)
        return bool(self.new_rows or self.new_metrics or self.taken_back)

    def _read_anew(self, run: RunFiles) -> None:
        """Forget what is shown, some of which was taken back, and read what there is now."""
        self.newest, self.metrics, self.trends = [], {}, {}
        rows = [row for path in run.rows for row in read_rows(path)]
        metrics = [record for path in run.metrics for _, record in numbered_records(path)[0]]
        self._add(rows, [found for record in metrics if (found := metrics_record(record))])

    def _add(self, rows: Iterable[SavedRow], metrics: Iterable[MetricsRecord]) -> None:
        for row in rows:
            if self.newest and self.newest[-1].when != row.when:
                self.newest = []
            self.axis = row.axis
            self.newest.append(row)
        for record in metrics:
            for name, value in record.values.items():
                self.metrics[name] = (record.step, value)
                if not isinstance(value, str):
                    self.trends.setdefault(name, collections.deque(maxlen=TREND)).append(float(value))


def metrics_record(record: Mapping[str, Any]) -> MetricsRecord | None:
    """What a line of metrics says; None where it has no step.

    Args:
        record: The line's object.
    """
    step = record.get("step")
    if not isinstance(step, int):
        return None
    own = ("step", "time")
    values = {name: value for name, value in record.items() if name not in own and isinstance(value, int | float | str)}
    return MetricsRecord(step=step, values=values)
