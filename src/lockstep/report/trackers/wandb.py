"""Weights & Biases, the only file that imports it."""

import dataclasses
import json
import os
import sys
import unittest.mock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.json_text import refused, typed
from lockstep.limits import read_small
from lockstep.printable import get_logger, public_arguments, visible
from lockstep.report.rows import TableRow, metric_names
from lockstep.report.trackers.base import Tracker, TrackerConfig, plain

if TYPE_CHECKING:
    import wandb

log = get_logger(__name__)

WANDB_RUN = "wandb-run.json"
"""The file of a run directory that says which W&B run this run is, so that a later start goes on in it."""
MAX_TABLE_ROWS = 10_000  # the number of rows of a whole job's table at most; a run's tables have no limit
MAX_INCREMENTS = 100
"""The number of times that rows are added to a W&B table: of more increments W&B shows only the last 100
(https://github.com/wandb/wandb/pull/9810)."""


@dataclasses.dataclass(frozen=True)
class _State:
    """The state of a table that is kept beside it."""

    table: int
    additions: int
    columns: list[str | int]
    step: int


class _GrowingTable:
    """The tables ``NAME``, ``NAME_2``, …, to which each addition sends the rows that are new, and ``NAME_state``.

    The columns of a W&B table are fixed, and W&B shows its last 100 increments. So another table, ``NAME_2``, goes on
    when a metric comes that the first has no column for, and after 100 additions. It has a name of its own because W&B
    keeps all increments of a name in one artifact, and links them where a run is resumed, whatever their columns.
    The state, from which a resumed run goes on, is logged with the rows: W&B has both or neither, whenever the process
    is killed.
    """

    def __init__(self, run: "wandb.Run", name: str) -> None:
        self._name, self._state = name, f"{name}_state"
        self._number, self._additions = 0, 0
        self._columns: list[str | int] = []
        self._table: wandb.Table | None = None
        self._logged_before: int | None = None
        if not run.resumed:
            return
        summary: Any = run.summary
        if state := summary.get(self._state):
            with refused(f"what W&B has of the table {name}", "Start a run of its own: another trainer.run_id."):
                saved = typed(_State, json.loads(state))
            self._number, self._additions, self._columns = saved.table, saved.additions, saved.columns
            self._logged_before = saved.step

    def add(self, rows: Sequence[TableRow], step: int) -> dict[str, Any]:
        """The values to log next; none where an earlier start has logged rows of this step or a later one."""
        import wandb

        if self._logged_before is not None and step <= self._logged_before:
            log.warning(
                "W&B has the rows of %s up to step %d, from before the run was resumed: the %d rows of step %d are not "
                "sent again",
                self._name,
                self._logged_before,
                len(rows),
                step,
            )
            return {}
        names = [*rows[0].columns, *metric_names(rows)]
        missing = [name for name in names if name not in self._columns]
        if missing or self._additions >= MAX_INCREMENTS:
            self._number, self._additions, self._table = self._number + 1, 0, None
            self._columns += missing
        if self._table is None:
            columns: list[str | int] = [visible(str(column)) for column in self._columns]
            self._table = wandb.Table(columns=columns, log_mode="INCREMENTAL")
        for row in rows:
            values = row.to_dict()
            self._table.add_data(*(values.get(str(column)) for column in self._columns))
        self._additions += 1
        state = {"table": self._number, "additions": self._additions, "columns": self._columns, "step": int(step)}
        return {
            self._name + (f"_{self._number}" if self._number > 1 else ""): self._table,
            self._state: json.dumps(state),
        }


class WandbTracker:
    """Logs to a Weights & Biases run.

    W&B has one history entry open, and drops what is logged for a step before it. So values that come late go into the
    open entry. A value named ``…/step`` becomes the x-axis of all values whose names begin like it.

    Args:
        alone: Whether nobody else logs to the run. Otherwise nothing here opens a new entry, and all values go into the
            open one.

    Example:
        >>> import wandb
        >>> run = wandb.init(mode="disabled")  # the run of your loop
        >>> lockstep.report.WandbTracker(run, alone=False).log({"loss": 2.5}, step=1)
    """

    def __init__(self, run: "wandb.Run", *, alone: bool = True) -> None:
        self._run, self._alone = run, alone
        self._tables: dict[str, _GrowingTable] = {}
        self._axes: set[str] = set()
        self._finished = False

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars; those of the same step become one history entry."""
        values = {visible(name): plain(value) for name, value in metrics.items()}
        for name in values.keys() - self._axes:
            if name.endswith("/step"):
                self._axes.add(name)
                self._run.define_metric(name)
                self._run.define_metric(name.removesuffix("step") + "*", step_metric=name)
        self._log(values, step)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add the rows to the table in W&B; only they are sent."""
        if rows and name not in self._tables:
            self._tables[name] = _GrowingTable(self._run, name)
        if rows and (values := self._tables[name].add(rows, step)):
            self._log(values, step)

    def alert(self, *, title: str, text: str, step: int) -> None:
        """Send a W&B alert, which its user gets by mail or in Slack."""
        self._run.alert(title=title, text=text, level="WARN")

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

    def check(self) -> None:
        """Import wandb, see ``TrackerConfig.check``."""
        try:
            import wandb  # noqa: F401 - whether it can be imported is the question
        except ImportError as error:
            raise ConfigError(
                f"the tracker is wandb, which cannot be imported: {error}. Install it on the leader with "
                "pip install 'jax-lockstep[wandb]', or choose type: jsonl."
            ) from error

    def build(self, run_dir: str | Path, run_name: str, config: Mapping[str, Any] | None = None) -> Tracker:
        """Start the tracker, see ``TrackerConfig.build``."""
        self.check()
        import wandb

        Path(run_dir).mkdir(parents=True, exist_ok=True)
        arguments: dict[str, Any] = {
            "project": self.project,
            "entity": self.entity,
            "name": self.name or run_name,
            "group": self.group,
            "tags": list(self.tags),
            "dir": str(run_dir),
            "config": dict(config or {}),
        }

        def begin(mode: Literal["online", "offline", "disabled"] | None, **more: str) -> "wandb.Run":
            # The terminal belongs to the samples table: no chat, no capture of stdout. Settings are made for each call,
            # because wandb.init writes the id of its run into them.
            settings = wandb.Settings(console="off", silent=True)
            # W&B keeps the command line in a file of the run.
            with unittest.mock.patch.object(sys, "argv", [*sys.argv[:1], *public_arguments(sys.argv[1:])]):
                return wandb.init(mode=mode, settings=settings, **arguments | more)

        file = Path(run_dir) / WANDB_RUN
        try:
            same = self._same_run(file)
            run = begin(self.mode, **({"id": same["id"], "resume": "allow"} if same else {}))
            if same and (run.entity, run.project) != (same["entity"], same["project"]):
                log.warning(
                    "%s is of a run in %s/%s, and this one is in %s/%s, as your configuration and W&B's settings say:"
                    " a file does not decide where rows go. Set tracker.entity and tracker.project for that one.",
                    *(file, same["entity"], same["project"], run.entity, run.project),
                )
            if not (run.offline or run.disabled):
                _remember(run, file)
            return WandbTracker(run)
        except Exception as error:  # W&B has several kinds, some of them of Python
            if self._mode != "online":
                raise ConfigError(f"wandb could not start (mode {self._mode}): {error}. Choose type: jsonl.") from error
            log.error(
                "wandb could not start online: %s. Given were project %s, entity %s%s and %s. The run goes on offline, "
                "in %s: upload it later with `wandb sync`. A valid key is at https://wandb.ai/authorize: put it into "
                "WANDB_API_KEY or run `wandb login`, or set tracker.mode: offline.",
                str(error).strip().rstrip("."),
                self.project or "W&B's default",
                self.entity or "W&B's default",
                f", the run of {file}" if file.exists() else "",
                _key_source(),
                Path(run_dir) / "wandb",
            )
        try:
            # A run of its own: W&B's service keeps the id of the one that did not start.
            return WandbTracker(begin("offline"))
        except Exception as error:
            raise ConfigError(f"wandb could not start offline either: {error}. Choose type: jsonl.") from error

    def _same_run(self, file: Path) -> dict[str, str]:
        """The run that an earlier start had online, in which W&B goes on; nothing where it is another run.

        An offline run has an id of its own, for nobody can know here what the server has.
        """
        if self._mode != "online" or not file.exists():
            return {}
        with refused(str(file), "Remove it: W&B gets a run of its own."):
            identity = typed(dict[str, str], json.loads(read_small(file)))
            for name in ("project", "entity"):
                if getattr(self, name) not in (None, identity[name]):
                    return {}
            return {name: identity[name] for name in ("id", "project", "entity")}

    @property
    def _mode(self) -> str:
        return self.mode or os.environ.get("WANDB_MODE") or "online"


def _remember(run: "wandb.Run", file: Path) -> None:
    """Write down which run it is."""
    write_file(file, json.dumps({"id": run.id, "project": run.project, "entity": run.entity}))


def _key_source() -> str:
    """The source of the key, without the key."""
    if key := os.environ.get("WANDB_API_KEY"):
        return f"a key of {len(key)} characters in WANDB_API_KEY"
    return "no WANDB_API_KEY (a key of `wandb login` may be in ~/.netrc)"
