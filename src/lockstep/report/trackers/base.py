"""The protocol of trackers, several at once, none, and their names in a configuration."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import draccus

from lockstep.config_fields import check_fields
from lockstep.plugins import OpenRegistry
from lockstep.printable import hide_credentials
from lockstep.report.jsonl import append_jsonl
from lockstep.report.rows import TableRow


class Tracker(Protocol):
    """A recorder of scalars and rows of tables while a run goes on.

    Example:
        >>> class Printed:
        ...     def log(self, metrics, *, step):
        ...         print(step, metrics)
        ...
        ...     def log_rows(self, name, rows, *, step):
        ...         print(step, name, len(rows))
        ...
        ...     def finish(self):
        ...         pass
        >>> tracker: lockstep.report.Tracker = Printed()
        >>> tracker.log({"loss": 2.5}, step=1)
        1 {'loss': 2.5}
    """

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars.

        Args:
            metrics: The values, a few of them texts, by their names.
            step: The number of training steps completed.
        """
        ...

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add rows to a table that grows over the run."""
        ...

    def finish(self) -> None:
        """Write out what is pending; nothing is logged afterwards. A second call does nothing."""
        ...


def rewind_tracker(tracker: Tracker, *, step: int, rounds_step: int, rounds: Sequence[str]) -> None:
    """Have a tracker forget what a run that goes on from a checkpoint logs again, where it can.

    A tracker that can has a method ``rewind`` with the same named arguments.

    Args:
        step: The last step whose values stay.
        rounds_step: The last step whose rounds of samples stay.
        rounds: The beginnings of the names of values and tables of rounds.
    """
    rewind = getattr(tracker, "rewind", None)
    if rewind is not None:
        rewind(step=step, rounds_step=rounds_step, rounds=rounds)


def alert_tracker(tracker: Tracker, *, title: str, text: str, step: int) -> None:
    """Have a tracker tell its user of something at once, where it can.

    A tracker that can has a method ``alert`` with the same named arguments.

    Args:
        title: The kind of thing, which is told seldom.
        text: One line.
        step: The number of training steps completed.
    """
    alert = getattr(tracker, "alert", None)
    if alert is not None:
        alert(title=title, text=text, step=step)


class NoopTracker:
    """A tracker that drops everything: the one of every process but the leader."""

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Drop the scalars."""

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Drop the rows."""

    def finish(self) -> None:
        """Do nothing."""


class CompositeTracker:
    """Passes everything on to several trackers; where one fails, the others still get it."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars in each tracker.

        Raises:
            Exception: What a tracker raised; an ExceptionGroup where several did.
        """
        self._each(lambda tracker: tracker.log(metrics, step=step))

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add rows in each tracker."""
        self._each(lambda tracker: tracker.log_rows(name, rows, step=step))

    def rewind(self, *, step: int, rounds_step: int, rounds: Sequence[str]) -> None:
        """Rewind each tracker that can, see `rewind_tracker`."""
        self._each(lambda tracker: rewind_tracker(tracker, step=step, rounds_step=rounds_step, rounds=rounds))

    def alert(self, *, title: str, text: str, step: int) -> None:
        """Have each tracker that can tell its user, see `alert_tracker`."""
        self._each(lambda tracker: alert_tracker(tracker, title=title, text=text, step=step))

    def finish(self) -> None:
        """Finish each tracker."""
        self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        errors: list[Exception] = []
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{len(errors)} trackers failed", errors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackerConfig(OpenRegistry, draccus.PluginRegistry, discover_packages_path="lockstep.report.trackers"):
    """Which tracker: ``type: wandb | tensorboard | jsonl | noop``, or ``my_module:MyTrackerConfig`` of your own.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Elsewhere(lockstep.report.TrackerConfig):
        ...     directory: str
        ...
        ...     def build(self, run_dir, run_name, config=None):
        ...         return lockstep.report.JsonlTracker(f"{self.directory}/{run_name}")
        ...
        >>> Elsewhere(directory="/tmp").directory
        '/tmp'
    """

    def __post_init__(self) -> None:
        check_fields(self, "tracker.")

    def check(self) -> None:
        """Check that what the tracker needs is installed; call it on the leader alone, before the run's work begins.

        Raises:
            ConfigError: A package is missing.
        """

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker; call it on the leader alone.

        Args:
            run_dir: The local directory of the run; everything that a tracker writes goes below it.
            config: The run's configuration, for trackers that show it.

        Raises:
            ConfigError: The tracker cannot start.
        """
        raise NotImplementedError


@TrackerConfig.register_subclass("noop")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoopTrackerConfig(TrackerConfig):
    """No tracking."""

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker, see ``TrackerConfig.build``."""
        return NoopTracker()


def plain(value: float | str) -> float | str:
    """Return a value as a plain Python number or text."""
    return value if isinstance(value, str) else float(value)


type TrackerChoice = TrackerConfig | tuple[TrackerConfig, ...]
"""One tracker or a list of them; draccus needs the union itself spelled out in a config's field."""


def check_trackers(choice: TrackerChoice) -> None:
    """Check that what one tracker or several need is installed; call it on the leader alone.

    Raises:
        ConfigError: A package is missing.
    """
    for tracker in (choice,) if isinstance(choice, TrackerConfig) else choice:
        tracker.check()


def build_tracker(
    choice: TrackerChoice, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None
) -> Tracker:
    """Start one tracker or several; call it on the leader alone.

    Args:
        choice: The value of the ``tracker`` field of a configuration; an empty list: no tracking.

    Raises:
        ConfigError: A tracker cannot start.
    """
    config = None if config is None else hide_credentials(config)
    if isinstance(choice, TrackerConfig):
        return choice.build(run_dir, run_name, config)
    return CompositeTracker([tracker.build(run_dir, run_name, config) for tracker in choice])


class JsonlTracker:
    """Appends ``{"step": …, "time": …, **metrics}`` to a file of JSON lines.

    Rows are not written: the callback itself keeps every row in ``samples.jsonl``, whatever the tracker.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        ...     lockstep.report.JsonlTracker(file.name).log({"loss": 2.5}, step=1)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

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
