"""W&B: what a run holds afterwards, and what becomes of a key that is no good."""

import json
import logging
import os
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.report import WANDB_RUN, WandbTracker, build_tracker
from lockstep.report.trackers import WandbTrackerConfig
from tests import wandb_run
from tests.http_replies import serving
from tests.unit.report.trackers.fakes import FakeRun, row


def test_what_comes_late_to_wandb_goes_into_the_open_entry():
    run = FakeRun()
    tracker = WandbTracker(run)
    tracker.log({"a": 1}, step=5)
    tracker.log({"b": 2}, step=3)
    tracker.log_rows("t", [row(3, "c")], step=3)
    tracker.log({"c": 3}, step=6)
    tracker.finish()
    tracker.finish()
    assert [(step, list(values)) for step, values in run.logged] == [
        (5, ["a"]),
        (5, ["b"]),
        (5, ["t", "t_state"]),
        (6, ["c"]),
    ]
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


def log_rounds(run, steps, late=6):
    """Log a row of each step, from step ``late`` on with one metric more; the names and steps of the tables."""
    tracker, tables = WandbTracker(run), {}
    for step in steps:
        tracker.log_rows("t", [row(step, "text", **({"good": 1.0} if step >= late else {}))], step=step)
        tables |= run.logged[-1][1]
    return {name: [cells[0] for cells in table.data] for name, table in tables.items() if name != "t_state"}


def test_another_wandb_table_goes_on_after_100_additions_and_with_a_new_column(monkeypatch):
    monkeypatch.setattr("lockstep.report.trackers.wandb.MAX_INCREMENTS", 3)
    run = FakeRun()
    assert log_rounds(run, range(1, 8)) == {"t": [1, 2, 3], "t_2": [4, 5], "t_3": [6, 7]}
    table = run.logged[-1][1]["t_3"]
    assert table.columns[-2:] == ["loop_from", "good"] and [cells[-1] for cells in table.data] == [1.0, 1.0]
    WandbTracker(run).log_rows("t", [], step=8)
    assert len(run.logged) == 7


def test_a_resumed_wandb_run_goes_on_in_its_table(monkeypatch):
    monkeypatch.setattr("lockstep.report.trackers.wandb.MAX_INCREMENTS", 3)
    first = FakeRun()
    assert log_rounds(first, [1, 2]) == {"t": [1, 2]}
    second = FakeRun(resumed=first)
    assert log_rounds(second, [3, 4]) == {"t": [3], "t_2": [4]}
    third = FakeRun(resumed=second)
    assert log_rounds(third, [5, 7]) == {"t_2": [5], "t_3": [7]}
    assert log_rounds(FakeRun(resumed=third), [8], late=9) == {"t_3": [8]}, "it has all columns and one more"


def test_rows_of_a_step_that_a_resumed_run_repeats_are_not_sent_again(caplog):
    first = FakeRun()
    log_rounds(first, [1, 2])
    second = FakeRun(resumed=first)
    tracker = WandbTracker(second)
    for step in (1, 2):
        tracker.log_rows("t", [row(step, "again")], step=step)
    assert second.logged == []
    assert "the rows of t up to step 2, from before the run was resumed: the 1 rows of step 1" in caplog.text
    for text in ("new", "a second report of the same step"):
        tracker.log_rows("t", [row(3, text)], step=3)
    assert [cells[0] for cells in second.logged[-1][1]["t"].data] == [3, 3]


OFFLINE_RUN = """
import sys
import jax
from lockstep.report import Row, build_tracker
from lockstep.report.trackers import WandbTrackerConfig
from lockstep.report.trackers import wandb as trackers
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
    tracker.alert(title="inference_eval: loop", text="step 10: loop in 24 of 32 answers", step=10)
    tracker.finish()
"""


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory):
    """The directory of a W&B run of ten rounds, each of which is reported two steps late."""
    directory = tmp_path_factory.mktemp("wandb")
    result = subprocess.run(
        [sys.executable, "-c", OFFLINE_RUN, str(directory / "run")], capture_output=True, text=True, cwd=directory
    )
    # At the end of a process on Python 3.14 wandb shuts OpenTelemetry down twice.
    logged = "shutdown can only be called once\n" if sys.version_info >= (3, 14) else ""
    assert (result.returncode, result.stdout, result.stderr) == (0, "", logged)
    assert [path.name for path in directory.iterdir()] == ["run"]
    assert [path.name for path in (directory / "run").iterdir()] == ["wandb"], "no id of it is kept"
    (run,) = directory.glob("run/wandb/offline-run-*")
    return run


@pytest.mark.slow
def test_an_offline_wandb_run_holds_every_row_once(offline_run):
    names = [f"inference_eval/samples{suffix}" for suffix in ("", "_2", "_3", "_4")]
    tables = [wandb_run.tables(offline_run, name) for name in names]
    # Another after four additions and, for the column, at the sixth.
    steps = [[sorted({cells[0] for cells in increment["data"]}) for increment in table] for table in tables]
    assert steps == [[[1], [2], [3], [4]], [[5]], [[6], [7], [8], [9]], [[10]]]
    increments = [increment for table in tables for increment in table]
    rows = [dict(zip(each["columns"], cells, strict=True)) for each in increments for cells in each["data"]]
    assert [(each["step"], each["prompt_id"], each["exact_match"], each.get("late")) for each in rows] == [
        (step, number, None if step < 3 else 1.0, 0.5 if step >= 6 else None)
        for step in range(1, 11)
        for number in (0, 1)
    ]
    assert ["late" in table[0]["columns"] for table in tables] == [False, False, True, True]


RESUMED_RUNS = """
import json, sys
import wandb
from lockstep.report import Row, WandbTracker
from lockstep.report.trackers import wandb as trackers
trackers.MAX_INCREMENTS = 4
def row(step):
    metrics = {"exact_match": 1.0} | ({"late": 0.5} if step >= 9 else {})
    return Row(step=step, prompt_id=0, generation_id=0, prompt="p", generated_text="g", num_tokens=1,
               finish_reason="stop", mean_logprob=-1.0, metrics=metrics)
summary = {}
for start, steps in enumerate([(1, 2, 3), (3, 4, 5, 6), (7,), (8, 9, 10), (10, 11)]):
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(mode="offline", project="test", id=f"start{start}", dir=sys.argv[1], settings=settings)
    if start:  # as wandb.init leaves a run that the server has
        run._settings.resumed = True
        run.summary.update(summary)
    tracker = WandbTracker(run)
    for step in steps:
        tracker.log_rows("samples", [row(step)], step=step)
        tracker.log({"loss": 2.0}, step=step)
    run.log({}, commit=True)
    summary = {name: run.summary.get(name) for name in run.summary.keys() if not name.startswith("_")}
    tracker.finish()
print(json.dumps(summary))
"""


@pytest.mark.slow
def test_a_wandb_run_that_is_resumed_again_and_again_holds_every_row_once(tmp_path):
    """W&B's own code links the increments, as for a run that its server has; tables grow full and get a column."""
    result = subprocess.run(
        [sys.executable, "-c", RESUMED_RUNS, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    starts = [next(tmp_path.glob(f"wandb/offline-run-*-start{start}")) for start in range(5)]
    shown, kept = [], []
    for name in ("samples", "samples_2", "samples_3"):
        logged = {
            values[f"{name}/artifact_path"]: json.loads((run / "files" / values[f"{name}/path"]).read_text())
            for run in starts
            for _, values in wandb_run.history(run)
            if f"{name}/path" in values
        }
        last = summary[name]
        linked = [logged[path] for path in (*last["previous_increments_paths"], last["artifact_path"])]
        assert len({tuple(each["columns"]) for each in linked}) == 1, "W&B shows them as one table"
        shown.append([cells[0] for each in linked for cells in each["data"]])
        kept.append(sorted(cells[0] for each in logged.values() for cells in each["data"]))
    assert shown == kept == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    assert linked[0]["columns"][-2:] == ["exact_match", "late"]


@pytest.mark.slow  # in make test: trackers/test_base.py and test_alarm_log.py, with a W&B of the test's own
def test_an_offline_wandb_run_has_the_alert(offline_run):
    assert wandb_run.alerts(offline_run) == [("inference_eval: loop", "step 10: loop in 24 of 32 answers", "WARN")]


@pytest.mark.slow
def test_an_offline_wandb_run_has_each_late_report_with_the_step_of_its_round(offline_run):
    history = wandb_run.history(offline_run)
    found = [(step, values["inference_eval/step"], values["train/loss"]) for step, values in history]
    assert found == [(step + 2, step, 2.0) for step in range(1, 11)]
    modes = [value for _, values in history for name, value in values.items() if name.endswith("/log_mode")]
    assert modes == ["INCREMENTAL"] * 10


def test_wandb_that_cannot_start_online_says_what_was_given_and_goes_on_offline(tmp_path, monkeypatch, caplog):
    import wandb

    modes = []

    def init(*, mode, **_):
        modes.append(mode)
        if mode != "offline":
            raise wandb.errors.AuthenticationError("The API key you provided is expired.")
        return FakeRun(offline=True)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "0123secret")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker = build_tracker(WandbTrackerConfig(project="mine"), tmp_path, "name")
    assert isinstance(tracker, WandbTracker) and modes == [None, "offline"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "0123secret" not in record.getMessage()
    for words in ("is expired. Given were project mine", "a key of 10 characters", "wandb sync", "https://wandb.ai/"):
        assert words in record.getMessage()


class Server:
    """``wandb.init`` with a server that can refuse, and what it was called with."""

    def __init__(self):
        self.calls, self.refuses = [], False

    def init(self, *, mode, **given):
        names = ("id", "resume", "project", "entity")
        self.calls.append((mode, *(given[name] for name in names if given.get(name) is not None)))
        offline = (mode or os.environ.get("WANDB_MODE")) == "offline"
        if self.refuses and not offline:
            raise ValueError("the key is expired")
        run = {"id": given.get("id") or f"made-{len(self.calls)}", "offline": offline}
        return FakeRun(project=given["project"] or "default-project", entity=given["entity"] or "me", **run)


@pytest.fixture
def server(monkeypatch):
    import wandb

    server = Server()
    monkeypatch.setattr(wandb, "init", server.init)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return server


def test_a_later_start_goes_on_in_the_same_wandb_run(server, tmp_path):
    for config in (WandbTrackerConfig(), WandbTrackerConfig(entity="me"), WandbTrackerConfig(mode="online")):
        build_tracker(config, tmp_path, "name")
    same = ("made-1", "allow")
    assert server.calls == [(None,), (None, *same, "me"), ("online", *same)]


def test_the_command_line_that_wandb_keeps_has_no_secrets(monkeypatch, tmp_path):
    import wandb

    seen = []
    monkeypatch.setattr(wandb, "init", lambda **given: seen.append(given["settings"]._args) or FakeRun())
    words = [
        "prog",
        "--judge.api_key",
        "hunter2",
        "--judge.url=https://user:pw@host/a?sig=s3cr3t",
        "--tokenizer",
        "a/b",
    ]
    monkeypatch.setattr("sys.argv", words)
    build_tracker(WandbTrackerConfig(mode="offline"), tmp_path, "name")
    assert seen == [["--judge.api_key", "…", "--judge.url=https://host/a?…", "--tokenizer", "a/b"]]
    assert words == sys.argv


def test_a_file_that_somebody_handed_over_does_not_decide_where_rows_go(server, tmp_path, caplog):
    text = json.dumps({"id": "theirs", "project": "bait", "entity": "thief"})
    (tmp_path / WANDB_RUN).write_text(text)
    build_tracker(WandbTrackerConfig(), tmp_path, "name")
    assert server.calls == [(None, "theirs", "allow")], "W&B's own defaults"
    assert "is of a run in thief/bait, and this one is in me/default-project" in caplog.text
    assert json.loads((tmp_path / WANDB_RUN).read_text())["entity"] == "me"


def test_another_project_has_a_wandb_run_of_its_own(server, tmp_path):
    for project in ("a", "b", "b", "a"):
        build_tracker(WandbTrackerConfig(project=project), tmp_path, "name")
    assert server.calls == [(None, "a"), (None, "b"), (None, "made-2", "allow", "b"), (None, "a")]


def test_an_offline_wandb_run_has_an_id_of_its_own_and_the_online_one_is_not_forgotten(server, tmp_path, monkeypatch):
    config = WandbTrackerConfig()
    build_tracker(WandbTrackerConfig(mode="offline"), tmp_path, "name")
    build_tracker(config, tmp_path, "name")
    server.refuses = True
    build_tracker(config, tmp_path, "name")
    server.refuses = False
    monkeypatch.setenv("WANDB_MODE", "offline")
    build_tracker(config, tmp_path, "name")
    monkeypatch.delenv("WANDB_MODE")
    build_tracker(config, tmp_path, "name")
    same = (None, "made-2", "allow")
    assert server.calls == [("offline",), (None,), same, ("offline",), (None,), same]


def test_wandb_that_cannot_start_offline_ends_the_run(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise OSError("disk full")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"mode offline\): disk full\. Choose type: jsonl"):
        build_tracker(WandbTrackerConfig(mode="offline"), tmp_path, "name")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match="offline either: disk full"):
        build_tracker(WandbTrackerConfig(), tmp_path, "name")


EXPIRED = """
import sys
from lockstep.report.trackers import WandbTrackerConfig, build_tracker
tracker = build_tracker(WandbTrackerConfig(project="test"), sys.argv[1], "name")
tracker.log({"train/loss": 2.0}, step=1)
tracker.finish()
"""


@pytest.mark.nightly  # in make slow: the tests around it
def test_a_key_that_the_server_refuses_leaves_an_offline_run_behind(tmp_path):
    """The run may have been online before."""
    (tmp_path / "run").mkdir()
    before = json.dumps({"id": "abcd1234", "project": "test", "entity": "us"})
    (tmp_path / "run" / WANDB_RUN).write_text(before)
    refusal = (401, {"errors": [{"message": "user is not logged in"}]}, {"Content-Type": "application/json"})
    with serving(refusal) as server:
        address = {"WANDB_BASE_URL": server.url.removesuffix("/v1"), "WANDB_API_KEY": "0" * 40}
        result = subprocess.run(
            [sys.executable, "-c", EXPIRED, str(tmp_path / "run")],
            env={key: value for key, value in os.environ.items() if key != "WANDB_MODE"} | address,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 0, result.stderr
    assert "wandb could not start online" in result.stderr and "goes on offline" in result.stderr
    (run,) = (tmp_path / "run").glob("wandb/offline-run-*")
    assert wandb_run.history(run) == [(1, {"train/loss": 2.0})]
    assert "abcd1234" not in run.name and (tmp_path / "run" / WANDB_RUN).read_text() == before


def test_names_of_metrics_have_no_control_characters():
    """A name may be that of a file; W&B refuses half of a surrogate pair, and a page would obey the rest."""
    run = FakeRun()
    tracker, name = WandbTracker(run), "data/\x1b[2J\udcff\n<b>é"
    tracker.log({name: 1.0, f"{name}/step": 1}, step=1)
    tracker.log_rows("t", [row(1, "a", **{name: 0.5})], step=1)
    shown = r"data/\x1b[2J\udcff" + "↵<b>é"
    (_, values), (_, rows) = run.logged
    assert values == {shown: 1.0, f"{shown}/step": 1} and run.axes[0] == (f"{shown}/step", None)
    assert shown in rows["t"].columns and rows["t"].data[0][rows["t"].columns.index(shown)] == 0.5
