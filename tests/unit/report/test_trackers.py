import dataclasses
import subprocess
import sys

import draccus
import pytest
import yaml

from lockstep.errors import ConfigError
from lockstep.report import (
    CompositeTracker,
    JsonlTracker,
    JsonlTrackerConfig,
    NoopTrackerConfig,
    Row,
    TrackerConfig,
    WandbTracker,
    WandbTrackerConfig,
    build_tracker,
    read_jsonl,
)
from tests import wandb_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tracker: TrackerConfig | tuple[TrackerConfig, ...] = NoopTrackerConfig()


class Recorder:
    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def _call(self, *call):
        self.calls.append(call)
        if self.error:
            raise self.error

    def log(self, metrics, *, step):
        self._call("log", metrics, step)

    def log_rows(self, name, rows, *, step):
        self._call("log_rows", name, rows, step)

    def finish(self):
        self._call("finish")


class FakeRun:
    """Drops what comes for a step that it has passed, as W&B does."""

    def __init__(self):
        self.step = 0
        self.logged = []
        self.axes = []
        self.finished = 0

    def log(self, values, *, step=None, commit=None):
        assert step is not None or commit is False, "W&B would open a new entry"
        if step is None or step >= self.step:
            self.step = max(self.step, step or 0)
            self.logged.append((self.step, values))

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def finish(self):
        self.finished += 1


def row(step, text, **metrics):
    return Row(
        step=step,
        prompt_id=0,
        generation_id=0,
        prompt="What?",
        generated_text=text,
        num_tokens=2,
        finish_reason="stop",
        mean_logprob=-0.5,
        metrics=metrics,
    )


def parse(text):
    return draccus.decode(Config, yaml.safe_load(text)).tracker


def test_one_tracker_or_a_list_from_yaml():
    assert parse("{}") == NoopTrackerConfig()
    assert parse("tracker: {type: jsonl}") == JsonlTrackerConfig()
    assert parse("tracker: [{type: jsonl}, {type: wandb, mode: offline, tags: [a]}]") == (
        JsonlTrackerConfig(),
        WandbTrackerConfig(mode="offline", tags=("a",)),
    )
    assert draccus.parse(Config, args=["--tracker.type", "wandb"]).tracker == WandbTrackerConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tracker: {type: tensorbord}", "Couldn't find a choice class for 'tensorbord'"),
        ("tracker: [{type: wandb, mod: offline}]", "fields `mod` are not valid"),
        ("tracker: {type: wandb, mode: sometimes}", "sometimes"),
    ],
)
def test_wrong_configs_are_refused(text, message):
    with pytest.raises(Exception, match=message):
        parse(text)


def test_jsonl_lines_hold_step_time_and_metrics(tmp_path):
    tracker = build_tracker(JsonlTrackerConfig(), tmp_path / "run", "name")
    tracker.log({"train/loss": 1.5}, step=1)
    tracker.log({"train/loss": float("nan")}, step=2)
    tracker.log_rows("inference_eval/samples", [row(2, "text")], step=2)
    tracker.finish()
    first, second = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (first["step"], first["train/loss"], second["train/loss"]) == (1, 1.5, "NaN")
    assert first["time"] <= second["time"]


def test_several_trackers_all_get_everything_even_when_one_fails(tmp_path):
    good, bad, worse = Recorder(), Recorder(OSError("disk full")), Recorder(ValueError("no"))
    with pytest.raises(OSError, match="disk full"):
        CompositeTracker([bad, good]).log({"x": 1.0}, step=3)
    with pytest.raises(ExceptionGroup, match="2 trackers failed"):
        CompositeTracker([bad, worse, good]).finish()
    assert good.calls == [("log", {"x": 1.0}, 3), ("finish",)]
    tracker = build_tracker((JsonlTrackerConfig(), NoopTrackerConfig()), tmp_path, "name")
    assert isinstance(tracker, CompositeTracker)
    assert isinstance(tracker.trackers[0], JsonlTracker)


def test_what_comes_late_to_wandb_goes_into_the_open_entry():
    run = FakeRun()
    tracker = WandbTracker(run)
    tracker.log({"a": 1}, step=5)
    tracker.log({"b": 2}, step=3)
    tracker.log_rows("t", [row(3, "c")], step=3)
    tracker.log({"c": 3}, step=6)
    tracker.finish()
    tracker.finish()
    assert [(step, list(values)) for step, values in run.logged] == [(5, ["a"]), (5, ["b"]), (5, ["t"]), (6, ["c"])]
    assert run.finished == 1


def test_beside_another_who_logs_nothing_moves_the_runs_step():
    run = FakeRun()
    tracker = WandbTracker(run, alone=False)
    tracker.log({"a": 1}, step=5)
    run.log({"theirs": 1}, step=2)
    tracker.log({"b": 1}, step=5)
    assert run.logged == [(0, {"a": 1.0}), (2, {"theirs": 1}), (2, {"b": 1.0})]


def test_a_value_named_step_is_the_x_axis_of_those_beside_it():
    run = FakeRun()
    tracker = WandbTracker(run)
    for step in (1, 2):
        tracker.log({"eval/step": step, "eval/a": 1.0}, step=step)
    assert run.axes == [("eval/step", None), ("eval/*", "eval/step")]


def test_a_wandb_table_begins_anew_with_its_newest_rows(monkeypatch):
    monkeypatch.setattr("lockstep.report.trackers.MAX_TABLE_ROWS", 2)
    monkeypatch.setattr("lockstep.report.trackers.MAX_INCREMENTS", 3)
    run = FakeRun()
    tracker = WandbTracker(run)
    seen = []
    for step in range(1, 8):
        tracker.log_rows("t", [row(step, "text", **({"good": 1.0} if step == 6 else {}))], step=step)
        table = run.logged[-1][1]["t"]
        seen.append([cells[0] for cells in table.data])
    # A new one at the fourth addition and, for the new column, at the sixth.
    assert seen == [[1], [1, 2], [1, 2, 3], [3, 4], [3, 4, 5], [5, 6], [5, 6, 7]]
    assert table.columns[-2:] == ["mean_logprob", "good"] and [cells[-1] for cells in table.data] == [None, 1.0, None]
    tracker.log_rows("t", [], step=8)
    assert len(run.logged) == 7


OFFLINE_RUN = """
import sys
import jax
from lockstep.report import Row, WandbTrackerConfig, build_tracker, trackers
trackers.MAX_INCREMENTS = 4
def row(step, number, metrics):
    return Row(step=step, prompt_id=number, generation_id=0, prompt="p", generated_text="g", num_tokens=1,
               finish_reason="stop", mean_logprob=-1.0, metrics=metrics)
with jax.no_execution(True):
    tracker = build_tracker(WandbTrackerConfig(mode="offline", project="test"), sys.argv[1], "name", {"seed": 3})
    for step in range(1, 11):
        tracker.log({"train/loss": 2.0}, step=step + 2)  # training goes on while a report is made
        metrics = {"exact_match": None if step < 3 else 1.0} | ({"late": 0.5} if step >= 6 else {})
        tracker.log_rows("inference_eval/samples", [row(step, number, metrics) for number in (0, 1)], step=step)
        tracker.log({"inference_eval/step": step, "inference_eval/exact_match": 0.25}, step=step)
    tracker.finish()
"""


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory):
    """The directory of a W&B run of ten rounds, each of which is reported two steps late."""
    directory = tmp_path_factory.mktemp("wandb")
    result = subprocess.run(
        [sys.executable, "-c", OFFLINE_RUN, str(directory / "run")], capture_output=True, text=True, cwd=directory
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert [path.name for path in directory.iterdir()] == ["run"]
    (run,) = directory.glob("run/wandb/offline-run-*")
    return run


def test_an_offline_wandb_run_holds_every_row_once_but_where_a_table_begins_anew(offline_run):
    increments = wandb_run.tables(offline_run, "inference_eval/samples")
    steps = [sorted({cells[0] for cells in table["data"]}) for table in increments]
    # Anew at the fifth addition, at the sixth for the column, and four additions later.
    assert steps == [[1], [2], [3], [4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [7], [8], [9], list(range(1, 11))]
    columns = increments[-1]["columns"]
    assert columns[-2:] == ["exact_match", "late"] and "late" not in increments[4]["columns"]
    rows = [dict(zip(columns, cells, strict=True)) for cells in increments[-1]["data"]]
    assert [(each["step"], each["prompt_id"], each["exact_match"], each["late"]) for each in rows] == [
        (step, number, None if step < 3 else 1.0, 0.5 if step >= 6 else None)
        for step in range(1, 11)
        for number in (0, 1)
    ]


def test_an_offline_wandb_run_has_each_late_report_with_the_step_of_its_round(offline_run):
    history = wandb_run.history(offline_run)
    found = [(step, values["inference_eval/step"], values["train/loss"]) for step, values in history]
    assert found == [(step + 2, step, 2.0) for step in range(1, 11)]
    assert all(values["inference_eval/samples/log_mode"] == "INCREMENTAL" for _, values in history)


def test_a_run_that_goes_on_under_its_name_goes_on_in_wandb(tmp_path):
    for _ in range(2):
        build_tracker(WandbTrackerConfig(mode="offline"), tmp_path, "my-run").finish()
    found = [wandb_run.run_id(path) for path in tmp_path.glob("wandb/offline-run-*")]
    assert found == ["my-run"] * len(found) and found


def test_wandb_that_cannot_start_says_what_to_do(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"mode online\): no API key\. Set WANDB_API_KEY, or set mode: offline"):
        build_tracker(WandbTrackerConfig(mode="online"), tmp_path, "name")
