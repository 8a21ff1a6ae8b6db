"""Where metrics and sample tables go. Only the leader holds a tracker that writes; none of them touches jax."""

import dataclasses
import logging
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

log = logging.getLogger(__name__)

MAX_TABLE_ROWS = 10_000
"""W&B shows no more rows of a table than this; older ones are left out of it."""


class Tracker(Protocol):
    """Takes numbers and rows as training goes on."""

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars, and now and then a text, at a step."""
        ...

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add rows to the growing table ``name``."""
        ...

    def finish(self) -> None:
        """Write out what is pending; nothing is logged after. A second call does nothing."""
        ...


class NoopTracker:
    """Drops everything: what every process but the leader holds."""

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
        path: a local file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Append one line; ``time`` is in seconds since the epoch."""
        values = {name: _plain(value) for name, value in metrics.items()}
        append_jsonl(self.path, [{"step": int(step), "time": round(time.time(), 3)} | values])

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Do nothing: rows are in ``samples.jsonl``."""

    def finish(self) -> None:
        """Do nothing: each line is on its way to the disk when ``log`` returns."""


class WandbTables:
    """Makes W&B tables that hold all rows so far, for a W&B table cannot change once it is logged."""

    def __init__(self) -> None:
        self._rows: dict[str, list[TableRow]] = {}

    def add(self, name: str, rows: Sequence[TableRow]) -> "wandb.Table":
        """The table ``name`` with these rows added."""
        import wandb

        kept = self._rows.setdefault(name, [])
        kept.extend(rows)
        if len(kept) > MAX_TABLE_ROWS:
            log.warning("table %s: more than %d rows, the oldest are left out of it", name, MAX_TABLE_ROWS)
            del kept[: len(kept) - MAX_TABLE_ROWS]
        columns: list[str | int] = [*kept[-1].columns, *metric_names(kept)]
        data = [[values.get(str(column)) for column in columns] for values in (row.to_dict() for row in kept)]
        return wandb.Table(columns=columns, data=data)


class WandbTracker:
    """Logs to a Weights & Biases run.

    W&B refuses a step below the run's last one: such values are logged at the last step.

    Args:
        run: what ``wandb.init`` returned.
    """

    def __init__(self, run: "wandb.Run") -> None:
        self._run = run
        self._step = 0
        self._tables = WandbTables()
        self._finished = False

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars; those of the same step become one history entry."""
        self._run.log({name: _plain(value) for name, value in metrics.items()}, step=self._advance(step))

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Log the table with all rows so far."""
        self._run.log({name: self._tables.add(name, rows)}, step=self._advance(step))

    def finish(self) -> None:
        """Close the run; online, wait for the upload."""
        if not self._finished:
            self._finished = True
            self._run.finish()

    def _advance(self, step: int) -> int:
        self._step = max(self._step, int(step))
        return self._step


class CompositeTracker:
    """Passes everything on to several trackers; one that fails does not keep the others from it.

    Args:
        trackers: in order.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars in each.

        Raises:
            Exception: what the tracker raised; an ExceptionGroup if several did.
        """
        self._each(lambda tracker: tracker.log(metrics, step=step))

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add rows in each.

        Raises:
            Exception: as ``log``.
        """
        self._each(lambda tracker: tracker.log_rows(name, rows, step=step))

    def finish(self) -> None:
        """Finish each.

        Raises:
            Exception: as ``log``.
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
            run_dir: local directory of the run; everything a tracker writes goes below it.
            run_name: name of the run.
            config: the run's configuration, for trackers that show it.

        Returns:
            The tracker.

        Raises:
            ConfigError: the tracker cannot start.
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
        project: W&B project; None: W&B's default.
        entity: user or team; None: W&B's default.
        name: name of the run; None: the run's name.
        group: group of runs.
        tags: tags of the run.
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
    """NumPy's numbers as Python's."""
    return value if isinstance(value, str) else float(value)


type TrackerChoice = TrackerConfig | tuple[TrackerConfig, ...]
"""One tracker or a list of them; draccus needs the union itself spelled out in a config's field."""


def build_tracker(
    choice: TrackerChoice, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None
) -> Tracker:
    """Start one tracker or several; call it on the leader alone.

    Args:
        choice: what the config's ``tracker`` field holds; an empty list: no tracking.
        run_dir: local directory of the run.
        run_name: name of the run.
        config: the run's configuration, for trackers that show it.

    Returns:
        The tracker, a composite one for a list.

    Raises:
        ConfigError: a tracker cannot start.
    """
    if isinstance(choice, TrackerConfig):
        return choice.build(run_dir, run_name, config)
    return CompositeTracker([each.build(run_dir, run_name, config) for each in choice])
