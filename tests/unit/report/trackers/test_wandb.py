"""W&B: what a run holds afterwards, and what becomes of a key that is no good."""

import http.server
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from lockstep.errors import ConfigError
from lockstep.report import WANDB_RUN, WandbTracker, WandbTrackerConfig, build_tracker
from tests import wandb_run
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
    monkeypatch.setattr("lockstep.report.trackers.wandb.MAX_TABLE_ROWS", 2)
    monkeypatch.setattr("lockstep.report.trackers.wandb.MAX_INCREMENTS", 3)
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
from lockstep.report import Row, WandbTrackerConfig, build_tracker
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
    assert [path.name for path in (directory / "run").iterdir()] == ["wandb"], "no id of it is kept"
    (run,) = directory.glob("run/wandb/offline-run-*")
    return run


@pytest.mark.slow
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
    same = ("made-1", "allow", "default-project", "me")
    assert server.calls == [(None,), (None, *same), ("online", *same)]


def test_another_project_has_a_wandb_run_of_its_own(server, tmp_path):
    for project in ("a", "b", "b", "a"):
        build_tracker(WandbTrackerConfig(project=project), tmp_path, "name")
    assert server.calls == [(None, "a"), (None, "b"), (None, "made-2", "allow", "b", "me"), (None, "a")]


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
    same = (None, "made-2", "allow", "default-project", "me")
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
from lockstep.report import WandbTrackerConfig, build_tracker
tracker = build_tracker(WandbTrackerConfig(project="test"), sys.argv[1], "name")
tracker.log({"train/loss": 2.0}, step=1)
tracker.finish()
"""


class Unauthorized(http.server.BaseHTTPRequestHandler):
    """A W&B server that knows no key."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"errors": [{"message": "user is not logged in"}]}'
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_key_that_the_server_refuses_leaves_an_offline_run_behind(tmp_path):
    """The run may have been online before."""
    (tmp_path / "run").mkdir()
    before = json.dumps({"id": "abcd1234", "project": "test", "entity": "us"})
    (tmp_path / "run" / WANDB_RUN).write_text(before)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unauthorized) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40}
        result = subprocess.run(
            [sys.executable, "-c", EXPIRED, str(tmp_path / "run")],
            env={key: value for key, value in os.environ.items() if key != "WANDB_MODE"} | address,
            capture_output=True,
            text=True,
            timeout=120,
        )
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "wandb could not start online" in result.stderr and "goes on offline" in result.stderr
    (run,) = (tmp_path / "run").glob("wandb/offline-run-*")
    assert wandb_run.history(run) == [(1, {"train/loss": 2.0})]
    assert "abcd1234" not in run.name and (tmp_path / "run" / WANDB_RUN).read_text() == before
