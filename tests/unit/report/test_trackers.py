import dataclasses
import json
import subprocess
import sys
from pathlib import Path

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
    def __init__(self):
        self.logged = []
        self.finished = 0

    def log(self, values, *, step):
        self.logged.append((step, values))

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


def test_wandb_steps_never_go_back_and_finish_is_once():
    run = FakeRun()
    tracker = WandbTracker(run)
    tracker.log({"a": 1}, step=5)
    tracker.log({"b": 2}, step=3)
    tracker.finish()
    tracker.finish()
    assert run.logged == [(5, {"a": 1.0}), (5, {"b": 2.0})]
    assert run.finished == 1


def test_the_wandb_table_grows_and_keeps_its_newest_rows(monkeypatch, caplog):
    run = FakeRun()
    tracker = WandbTracker(run)
    tracker.log_rows("t", [row(1, "a")], step=1)
    tracker.log_rows("t", [row(2, "b", good=1.0)], step=2)
    tables = [values["t"] for _, values in run.logged]
    assert [len(table.data) for table in tables] == [1, 2]
    assert tables[1].columns[-2:] == ["mean_logprob", "good"]
    assert [cells[-1] for cells in tables[1].data] == [None, 1.0]
    monkeypatch.setattr("lockstep.report.trackers.MAX_TABLE_ROWS", 2)
    tracker.log_rows("t", [row(3, "c")], step=3)
    assert [cells[0] for cells in run.logged[-1][1]["t"].data] == [2, 3]
    assert "more than 2 rows, the oldest are left out" in caplog.text


OFFLINE_RUN = """
import sys
import jax
from lockstep.report import Row, WandbTrackerConfig, build_tracker
row = Row(step=1, prompt_id=0, generation_id=0, prompt="p", generated_text="g", num_tokens=1, finish_reason="stop",
          mean_logprob=-1.0, metrics={"exact_match": 1.0})
with jax.no_execution(True):
    tracker = build_tracker(WandbTrackerConfig(mode="offline", project="test"), sys.argv[1], "name", {"seed": 3})
    tracker.log({"train/loss": 2.0}, step=1)
    tracker.log_rows("inference_eval/samples", [row], step=1)
    tracker.log_rows("inference_eval/samples", [row], step=2)
    tracker.finish()
"""


def test_an_offline_wandb_run_is_silent_launches_nothing_and_holds_the_growing_table(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", OFFLINE_RUN, str(tmp_path / "run")], capture_output=True, text=True, cwd=tmp_path
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    tables = Path(tmp_path).glob("run/wandb/offline-run-*/files/media/table/inference_eval/samples_*.json")
    assert sorted(len(json.loads(path.read_text())["data"]) for path in tables) == [1, 2]


def test_wandb_that_cannot_start_says_what_to_do(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"mode online\): no API key\. Set WANDB_API_KEY, or set mode: offline"):
        build_tracker(WandbTrackerConfig(mode="online"), tmp_path, "name")
