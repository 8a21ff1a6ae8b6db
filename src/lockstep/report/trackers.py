"""Trackers: where metrics and tables of samples go. Only the leader has one that writes; none of them uses jax."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import draccus

from lockstep.errors import ConfigError
from lockstep.report.jsonl import append_jsonl
from lockstep.report.rows import TableRow, metric_names

if TYPE_CHECKING:
    import wandb

MAX_TABLE_ROWS = 10_000
"""The number of rows that a W&B table begins with at most; older ones are in the tables before it."""
MAX_INCREMENTS = 100
"""The number of times that rows are added to a W&B table: of more increments W&B shows only the last 100
(https://github.com/wandb/wandb/pull/9810)."""


class Tracker(Protocol):
    """What records scalars and rows of tables while a run goes on."""

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars.

        Args:
            metrics: The values, a few of them texts, by their names.
            step: The number of training steps completed.
        """
        ...

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add rows to a table that grows over the run.

        Args:
            name: The table's name.
            rows: The rows.
            step: The number of training steps completed.
        """
        ...

    def finish(self) -> None:
        """Write out what is pending; nothing is logged afterwards. A second call does nothing."""
        ...


class NoopTracker:
    """A tracker that drops everything: the one of every process but the leader."""

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Drop the scalars."""

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Drop the rows."""

    def finish(self) -> None:
        """Do nothing."""


class JsonlTracker:
    """Appends ``{"step": …, "time": …, **metrics}`` to a file of JSON lines.

    Rows are not written: the callback itself keeps every row in ``samples.jsonl``, whatever the tracker.

    Args:
        path: The local file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Append one line. Its ``time`` is in seconds since the epoch."""
        values = {name: _plain(value) for name, value in metrics.items()}
        append_jsonl(self.path, [{"step": int(step), "time": round(time.time(), 3)} | values])

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Do nothing: rows are in ``samples.jsonl``."""

    def finish(self) -> None:
        """Do nothing: the system has each line when ``log`` returns."""


class WandbTables:
    """W&B tables that grow over a run: each addition sends the rows that are new, and no others.

    The columns of a W&B table are fixed, and W&B shows its last 100 increments. So a table begins anew, with the newest
    10,000 rows, when a metric comes that it has no column for, and after 100 additions.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _GrowingTable] = {}

    def add(self, name: str, rows: Sequence[TableRow]) -> "wandb.Table":
        """The table with these rows added, to be logged before the next addition.

        Args:
            name: The table's name.
            rows: The rows to add, at least one.
        """
        return self._tables.setdefault(name, _GrowingTable()).add(rows)


class _GrowingTable:
    def __init__(self) -> None:
        self._columns: list[str | int] = []
        self._newest: collections.deque[dict[str, Any]] = collections.deque(maxlen=MAX_TABLE_ROWS)
        self._table: wandb.Table | None = None
        self._additions = 0

    def add(self, rows: Sequence[TableRow]) -> "wandb.Table":
        import wandb

        new = [row.to_dict() for row in rows]
        self._newest.extend(new)
        names = [*rows[0].columns, *metric_names(rows)]
        missing = [name for name in names if name not in self._columns]
        if self._table is None or missing or self._additions == MAX_INCREMENTS:
            self._columns += missing
            self._table, self._additions = wandb.Table(columns=list(self._columns), log_mode="INCREMENTAL"), 0
            new = list(self._newest)
        for values in new:
            self._table.add_data(*(values.get(str(column)) for column in self._columns))
        self._additions += 1
        return self._table


class WandbTracker:
    """Logs to a Weights & Biases run.

    W&B has one history entry open, and drops what is logged for a step before it. So values that come late go into the
    open entry. A value named ``…/step`` becomes the x-axis of all values whose names begin like it.

    Args:
        run: The run that ``wandb.init`` returned.
        alone: Whether nobody else logs to the run. Otherwise nothing here opens a new entry, and all values go into the
            open one.
    """

    def __init__(self, run: "wandb.Run", *, alone: bool = True) -> None:
        self._run, self._alone = run, alone
        self._tables = WandbTables()
        self._axes: set[str] = set()
        self._finished = False

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars; those of the same step become one history entry."""
        for name in metrics.keys() - self._axes:
            if name.endswith("/step"):
                self._axes.add(name)
                self._run.define_metric(name)
                self._run.define_metric(name.removesuffix("step") + "*", step_metric=name)
        self._log({name: _plain(value) for name, value in metrics.items()}, step)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add the rows to the table in W&B; only they are sent."""
        if rows:
            self._log({name: self._tables.add(name, rows)}, step)

    def finish(self) -> None:
        """Close the run; online, wait for the upload."""
        if not self._finished:
            self._finished = True
            self._run.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._alone and step > self._run.step:
            self._run.log(values, step=step)
        else:
            self._run.log(values, commit=False)


class CompositeTracker:
    """Passes everything on to several trackers; where one fails, the others still get it.

    Args:
        trackers: The trackers, in the order in which they are called.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars in each tracker.

        Raises:
            Exception: What a tracker raised; an ExceptionGroup where several did.
        """
        self._each(lambda tracker: tracker.log(metrics, step=step))

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add rows in each tracker.

        Raises:
            Exception: As for ``log``.
        """
        self._each(lambda tracker: tracker.log_rows(name, rows, step=step))

    def finish(self) -> None:
        """Finish each tracker.

        Raises:
            Exception: As for ``log``.
        """
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
class TrackerConfig(draccus.ChoiceRegistry):
    """Which tracker: ``type: wandb | jsonl | noop``."""

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker; call it on the leader alone.

        Args:
            run_dir: The local directory of the run; everything that a tracker writes goes below it.
            run_name: The name of the run.
            config: The run's configuration, for trackers that show it.

        Returns:
            The tracker.

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


@TrackerConfig.register_subclass("jsonl")
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlTrackerConfig(TrackerConfig):
    """JSON lines in ``metrics.jsonl`` below the run's directory."""

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker, see ``TrackerConfig.build``."""
        return JsonlTracker(Path(run_dir) / "metrics.jsonl")


@TrackerConfig.register_subclass("wandb")
@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbTrackerConfig(TrackerConfig):
    """A Weights & Biases run.

    Args:
        project: The W&B project; None: W&B's default.
        entity: The user or team; None: W&B's default.
        name: The name of the run in W&B; None: that of the run.
        group: The group of runs that it belongs to.
        tags: The tags of the run.
        mode: ``online`` | ``offline`` | ``disabled``; None: as the environment (``WANDB_MODE``) says, else online.
    """

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker, see ``TrackerConfig.build``."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"the tracker is wandb, which cannot be imported: {error}. Install it (pip install wandb), or choose "
                "type: jsonl."
            ) from error

        Path(run_dir).mkdir(parents=True, exist_ok=True)
        try:
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=self.name or run_name,
                # A run that goes on under its name goes on in W&B too.
                id=run_name,
                resume="allow",
                group=self.group,
                tags=list(self.tags),
                mode=self.mode,
                dir=str(run_dir),
                config=dict(config or {}),
                # The terminal belongs to the samples table: no chat, no capture of stdout.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb could not start (mode {self.mode or 'default'}): {error}. Set WANDB_API_KEY, or set mode: "
                "offline in the tracker's config and upload later with `wandb sync`."
            ) from error
        return WandbTracker(run)


def _plain(value: float | str) -> float | str:
    """The value as a plain Python number or text."""
    return value if isinstance(value, str) else float(value)


type TrackerChoice = TrackerConfig | tuple[TrackerConfig, ...]
"""One tracker or a list of them; draccus needs the union itself spelled out in a config's field."""


def build_tracker(
    choice: TrackerChoice, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None
) -> Tracker:
    """Start one tracker or several; call it on the leader alone.

    Args:
        choice: The value of the ``tracker`` field of a configuration; an empty list: no tracking.
        run_dir: The local directory of the run.
        run_name: The name of the run.
        config: The run's configuration, for trackers that show it.

    Returns:
        The tracker, a composite one for a list.

    Raises:
        ConfigError: A tracker cannot start.
    """
    if isinstance(choice, TrackerConfig):
        return choice.build(run_dir, run_name, config)
    return CompositeTracker([each.build(run_dir, run_name, config) for each in choice])
