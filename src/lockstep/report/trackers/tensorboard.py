"""TensorBoard event files, by tensorboardX: the only file that imports it."""

import dataclasses
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lockstep.config_fields import FilePath
from lockstep.errors import ConfigError, check_local
from lockstep.printable import printable, visible
from lockstep.report.rows import TableRow, metric_names
from lockstep.report.trackers.base import Tracker, TrackerConfig, plain

FLUSH_S = 10  # seconds after which what was logged is on disk, where TensorBoard sees it


class TensorboardTracker:
    """Writes event files: numbers as scalars, the rows of a step as one Markdown table among the texts."""

    def __init__(self, directory: str | Path) -> None:
        import tensorboardX

        self._directory = Path(directory).absolute()
        self._writer: Any = tensorboardX.SummaryWriter(str(self._directory), flush_secs=FLUSH_S)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars and texts."""
        for name, value in ((visible(name), value) for name, value in metrics.items()):
            if isinstance(value, str):
                self._writer.add_text(name, escape_markdown(value), step)
            else:
                self._writer.add_scalar(name, plain(value), step)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Record the rows as a table among the texts of this step."""
        if rows:
            self._writer.add_text(name, markdown_table(rows), step)

    def rewind(self, *, step: int, rounds_step: int, rounds: Sequence[str]) -> None:
        """Have TensorBoard forget the values that a run which goes on logs again, see `rewind_tracker`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # The start of a session makes TensorBoard forget all values of its step and of later ones, unless it is the
        # first start that TensorBoard sees, so there are two.
        repeated = [event for event in _events(self._directory) if rounds_step < event.step <= step]
        for _ in range(2):
            start = Event(session_log=SessionLog(status=SessionLog.START))
            self._writer.file_writer.add_event(start, step=rounds_step + 1)
        for event in repeated:
            if values := [value for value in event.summary.value if not value.tag.startswith(tuple(rounds))]:
                del event.summary.value[:]
                event.summary.value.extend(values)
                self._writer.file_writer.add_event(event, step=event.step, walltime=event.wall_time)

    def alert(self, *, title: str, text: str, step: int) -> None:
        """Record a text named ``alarms``."""
        self._writer.add_text("alarms", escape_markdown(f"{title}: {text}"), step)

    def finish(self) -> None:
        """Write out what is pending and close the files."""
        self._writer.close()


def markdown_table(rows: Sequence[TableRow]) -> str:
    """Return rows as a Markdown table, as TensorBoard shows it."""
    names = [*rows[0].columns, *metric_names(rows)]
    values = [row.to_dict() for row in rows]
    lines = [
        [*map(escape_markdown, names)],
        ["---"] * len(names),
        *([_cell(row_values.get(name)) for name in names] for row_values in values),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    """A value inside one cell."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else escape_markdown(str(value))


_MARKUP: Final = re.compile("[!-/:-@\\[-`{-~]|^ | $", re.MULTILINE)
"""Characters that Markdown may have a use for: all of ASCII but letters, digits and spaces within a line."""


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in a table or alone: nothing in it is markup, a link or a picture.

    Lines stay lines. Control characters, which TensorBoard drops, stand there as escapes.
    """
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", printable(text)).replace("\n", "<br>")


def _events(directory: Path) -> Iterator[Any]:
    """The events of all files in a directory, each file up to a record that was not written whole."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.glob("events.out.tfevents.*")):
        with open(path, "rb") as file:
            # A record of TFRecord: its length in 8 bytes, their checksum, the record, its checksum.
            while len(head := file.read(12)) == 12:
                (size,) = struct.unpack_from("<Q", head)
                record = file.read(size + 4)
                if len(record) < size + 4:
                    break
                yield Event.FromString(record[:size])


@TrackerConfig.register_subclass("tensorboard")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorboardTrackerConfig(TrackerConfig):
    """TensorBoard event files in ``tensorboard`` below the run's directory.

    Args:
        logdir: The directory that TensorBoard is pointed to, in which each run has one of its name; None:
            ``tensorboard`` below the run's directory.
    """

    logdir: FilePath | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
