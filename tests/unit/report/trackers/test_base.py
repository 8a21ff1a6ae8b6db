"""Several trackers, and how a configuration names them."""

import dataclasses
import sys

import draccus
import pytest
import yaml

from lockstep.errors import ConfigError
from lockstep.report import (
    BackgroundTracker,
    JsonlTracker,
    JsonlTrackerConfig,
    NoopTracker,
    TrackerConfig,
    WandbTracker,
    alert_tracker,
    build_tracker,
    check_trackers,
    read_jsonl,
    trackers,
)
from lockstep.report.trackers import (
    CompositeTracker,
    NoopTrackerConfig,
    TensorboardTracker,
    TensorboardTrackerConfig,
    WandbTrackerConfig,
)
from tests.unit.report.trackers.fakes import FakeRun, row


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


MINE = """
import dataclasses
from lockstep.report import TrackerConfig

@TrackerConfig.register_subclass("mine")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MineConfig(TrackerConfig):
    words: str
"""


def test_a_tracker_is_one_file_of_the_package(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(trackers, "__path__", [*trackers.__path__, str(tmp_path)])
    monkeypatch.setattr(TrackerConfig, "_did_discover_packages", False)
    monkeypatch.setattr(TrackerConfig, "_choice_registry", dict(TrackerConfig._choice_registry))
    assert parse("tracker: [{type: mine, words: few}, {type: noop}]")[0].words == "few"
    assert set(TrackerConfig.get_known_choices()) == {"jsonl", "mine", "noop", "tensorboard", "wandb"}


def parse(text):
    return draccus.decode(Config, yaml.safe_load(text)).tracker


def test_one_tracker_or_a_list_from_yaml():
    assert parse("{}") == NoopTrackerConfig()
    assert parse("tracker: {type: jsonl}") == JsonlTrackerConfig()
    assert parse("tracker: {type: tensorboard, logdir: x}") == TensorboardTrackerConfig(logdir="x")
    assert parse("tracker: [{type: jsonl}, {type: wandb, mode: offline, tags: [a]}]") == (
        JsonlTrackerConfig(),
        WandbTrackerConfig(mode="offline", tags=("a",)),
    )
    assert parse("tracker: {type: wandb}") == WandbTrackerConfig()


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


def test_a_tracker_whose_package_is_missing_is_found_before_it_is_started(monkeypatch):
    check_trackers(WandbTrackerConfig())
    check_trackers(())
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_trackers(JsonlTrackerConfig())
    for choice in (WandbTrackerConfig(), (JsonlTrackerConfig(), WandbTrackerConfig(mode="offline"))):
        with pytest.raises(ConfigError, match=r"cannot be imported.* on the leader with pip install 'jax-lockstep\["):
            check_trackers(choice)


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


def test_every_tracker_that_can_tells_its_user_of_an_alarm(tmp_path):
    class Own(Recorder):
        def alert(self, *, title, text, step):
            self.calls.append((title, text, step))

    own, run = Own(), FakeRun()
    events = TensorboardTracker(tmp_path)
    several = CompositeTracker([NoopTracker(), JsonlTracker(tmp_path / "m.jsonl"), WandbTracker(run), events, own])
    tracker = BackgroundTracker(several)
    alert_tracker(tracker, title="samples: loop", text="step 7: loop in 24 of 32 answers", step=7)
    tracker.finish()
    assert own.calls[0] == ("samples: loop", "step 7: loop in 24 of 32 answers", 7) and tracker.errors == 0
    assert run.alerts == [("samples: loop", "step 7: loop in 24 of 32 answers", "WARN")]
    assert not (tmp_path / "m.jsonl").exists()


def test_jsonl_lines_hold_step_time_and_metrics(tmp_path):
    tracker = build_tracker(JsonlTrackerConfig(), tmp_path / "run", "name")
    tracker.log({"train/loss": 1.5}, step=1)
    tracker.log({"train/loss": float("nan")}, step=2)
    tracker.log_rows("inference_eval/samples", [row(2, "text")], step=2)
    tracker.finish()
    first, second = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (first["step"], first["train/loss"], second["train/loss"]) == (1, 1.5, "NaN")
    assert first["time"] <= second["time"]
