"""TensorBoard event files, by tensorboardX: the only file that imports it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, check_local
from lockstep.report.rows import TableRow, metric_names
from lockstep.report.trackers.base import Tracker, TrackerConfig, plain

FLUSH_S = 10  # seconds after which what was logged is on disk, where TensorBoard sees it


class TensorboardTracker:
    """Writes event files: numbers as scalars, the rows of a step as one Markdown table among the texts."""

    def __init__(self, directory: str | Path) -> None:
        import tensorboardX

        self._writer: Any = tensorboardX.SummaryWriter(str(directory), flush_secs=FLUSH_S)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars and texts."""
        for name, value in metrics.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            else:
                self._writer.add_scalar(name, plain(value), step)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Record the rows as a table among the texts of this step."""
        if rows:
            self._writer.add_text(name, markdown_table(rows), step)

    def finish(self) -> None:
        """Write out what is pending and close the files."""
        self._writer.close()


def markdown_table(rows: Sequence[TableRow]) -> str:
    """Return rows as a Markdown table, as TensorBoard shows it."""
    names = [*rows[0].columns, *metric_names(rows)]
    values = [row.to_dict() for row in rows]
    lines = [names, ["---"] * len(names), *([_cell(each.get(name)) for name in names] for each in values)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    """A value inside one cell: a line break or a bar in it would end the row or the cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    escaped = str(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
    return "<br>".join(escaped.splitlines())


@TrackerConfig.register_subclass("tensorboard")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorboardTrackerConfig(TrackerConfig):
    """TensorBoard event files in ``tensorboard`` below the run's directory.

    Args:
        logdir: The directory that TensorBoard is pointed to, in which each run has one of its name; None:
            ``tensorboard`` below the run's directory.
    """

    logdir: str | None = None

    def __post_init__(self) -> None:
        if self.logdir is not None:
            check_local("tracker.logdir", self.logdir, "Copy it to the bucket when the run has ended.")

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker, see ``TrackerConfig.build``."""
        directory = Path(run_dir) / "tensorboard" if self.logdir is None else Path(self.logdir) / run_name
        try:
            return TensorboardTracker(directory)
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"the tracker is tensorboard, which cannot start in {directory}: {error}. Install tensorboardX, give a "
                "tracker.logdir that can be written, or choose type: jsonl."
            ) from error
