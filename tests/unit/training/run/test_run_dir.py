"""The directory of a run, and what is said of it at the end."""

import json

import pytest
import wandb

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.report import append_jsonl, read_jsonl
from lockstep.report.trackers import WandbTrackerConfig
from lockstep.training import CheckpointerConfig, TrainerConfig
from lockstep.training.checkpoints.config import resumable_base
from lockstep.training.checkpoints.saved_model import has_checkpoint, saved_model
from lockstep.training.loop.stopping import TrainResult
from lockstep.training.run.run_dir import closing_summary, make_run_dir, rewind, start_tracker
from tests.multiprocess.harness import run_threads
from tests.unit.report.trackers.fakes import FakeRun

FULL = {"model": None, "completed_steps": 7, "loss": 1.5, "stopped_by": None, "tracker_errors": 0}


def alone():
    return Hosts(*MemoryClient.hub(1))


def settings(log_dir, run_id=None, **values):
    return TrainerConfig(log_dir=str(log_dir), run_id=run_id, **values)


def result(**values):
    return TrainResult(**{**FULL, **values})


def test_every_host_has_the_leaders_directory(tmp_path):
    paths = run_threads(lambda hosts: make_run_dir(settings(tmp_path), hosts), 3)
    assert len(set(paths)) == 1 and paths[0].is_dir() and [paths[0]] == list(tmp_path.iterdir())


def test_a_given_name_is_the_directorys(tmp_path):
    assert make_run_dir(settings(tmp_path, "mine"), alone()) == tmp_path / "mine"


def test_two_runs_without_a_name_have_different_ones(tmp_path):
    assert make_run_dir(settings(tmp_path), alone()) != make_run_dir(settings(tmp_path), alone())


def test_a_directory_with_links_that_lead_out_is_refused(tmp_path):
    checkpointed = settings(tmp_path, "mine", checkpointer=CheckpointerConfig(every=1))
    path = make_run_dir(checkpointed, alone())
    assert make_run_dir(checkpointed, alone()) == path
    (path / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(PeerError, match=r"mine/checkpoints is a link that leads out of .*mine"):
        make_run_dir(checkpointed, alone())


def test_a_directory_with_files_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "samples.jsonl").touch()
    with pytest.raises(PeerError, match=r"mine is not empty; .* Choose another trainer\.run_id"):
        make_run_dir(settings(tmp_path, "mine"), alone())


def test_a_run_with_checkpoints_goes_on_in_its_own_directory(tmp_path):
    with_checkpoints = settings(tmp_path, "mine", checkpointer=CheckpointerConfig())
    path = make_run_dir(with_checkpoints, alone())
    (path / "samples.jsonl").touch()
    assert make_run_dir(with_checkpoints, alone()) == path
    for refused, text in [
        (settings(tmp_path, "mine"), "is not empty"),
        (settings(tmp_path, "mine", checkpointer=CheckpointerConfig(), resume="never"), "is not empty"),
        (settings(tmp_path, "mine", checkpointer=CheckpointerConfig(base_path="other")), "base_path checkpoints, but"),
    ]:
        with pytest.raises(PeerError, match=text):
            make_run_dir(refused, alone())


def test_where_the_checkpoints_are_is_kept_without_credentials(tmp_path):
    url = "s3://key:hush@bucket/checkpoints?sig=hush"
    with_checkpoints = settings(tmp_path, "mine", checkpointer=CheckpointerConfig(base_path=url))
    path = make_run_dir(with_checkpoints, alone())
    assert "hush" not in (path / "resumable.json").read_text() and resumable_base(path) == "s3://bucket/checkpoints?…"
    assert make_run_dir(with_checkpoints, alone()) == path
    other = settings(tmp_path, "mine", checkpointer=CheckpointerConfig(base_path="s3://key:hush@other"))
    with pytest.raises(PeerError, match=r"base_path s3://bucket/checkpoints\?…, but now it is s3://other\."):
        make_run_dir(other, alone())


@pytest.mark.parametrize("base_path", ["/elsewhere/checkpoints", "gs://somebody-elses/checkpoints"])
def test_a_run_that_somebody_handed_over_leads_to_no_other_place(tmp_path, base_path):
    (tmp_path / "resumable.json").write_text(json.dumps({"base_path": base_path}))
    for read in (saved_model, has_checkpoint):
        with pytest.raises(ConfigError, match=rf"not below .*If you have, give the place: {base_path}/{tmp_path.name}"):
            read(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"base_path": 1}', '{"base_path": "../other"}', '{"base_path": ""}']
)
def test_a_run_that_somebody_handed_over_names_no_directory_beside_it(tmp_path, text):
    (tmp_path / "resumable.json").write_text(text)
    with pytest.raises(ConfigError, match="resumable.json .* Give the directory of the checkpoints itself"):
        resumable_base(tmp_path)


def test_a_directory_that_is_not_of_a_run_with_checkpoints_is_refused_to_one(tmp_path):
    (make_run_dir(settings(tmp_path, "mine"), alone()) / "samples.jsonl").touch()
    with pytest.raises(PeerError, match="is not empty"):
        make_run_dir(settings(tmp_path, "mine", checkpointer=CheckpointerConfig()), alone())


def test_what_a_resumed_run_will_write_again_is_removed(tmp_path):
    records = [{"step": step} for step in (1, 2, 3)]
    for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "health.jsonl", "other.jsonl"):
        append_jsonl(tmp_path / name, records)
    rewind(tmp_path, metrics_step=2, samples_step=1)
    assert read_jsonl(tmp_path / "metrics.jsonl") == records[:2]
    assert read_jsonl(tmp_path / "samples.jsonl") == read_jsonl(tmp_path / "health.jsonl") == records[:1]
    assert read_jsonl(tmp_path / "rollouts.jsonl") == records[:2]
    assert read_jsonl(tmp_path / "other.jsonl") == records


def test_the_summary_says_how_to_resume(tmp_path):
    url = "s3://key:hush@bucket/model?sig=hush"
    assert "hush" not in closing_summary(tmp_path, result(checkpoint=url), 10, url)
    text = closing_summary(tmp_path, result(stopped_by=15, checkpoint="runs/a/checkpoints/step-7"), 10, None)
    assert "state      runs/a/checkpoints/step-7" in text and "the same command again" in text
    assert "no checkpoint was saved" not in text
    assert "2 checkpoints could not be saved" in closing_summary(tmp_path, result(checkpoint_errors=2), 10, None)


def test_the_summary_lists_what_is_there_and_nothing_else(tmp_path):
    (tmp_path / "samples.jsonl").touch()
    (tmp_path / "metrics.jsonl").touch()
    text = closing_summary(tmp_path, result(), 10, None)
    assert "done: 7 of 10 steps, last loss 1.5000" in text
    assert f"samples    {tmp_path}/samples.jsonl" in text and f"metrics    {tmp_path}/metrics.jsonl" in text
    assert "checkpoint" not in text and "wandb sync" not in text
    assert f"  lockstep report {tmp_path}   # " in text
    (tmp_path / "samples.jsonl").unlink()
    assert "lockstep report" not in closing_summary(tmp_path, result(), 10, None)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"loss": -0.0}, "last loss 0.0000"),
        ({"loss": float("nan")}, "last loss –"),
        (
            {"loss": -0.0, "progress": "reward 0.2500 (last 10: 0.2000)  rollout 1.0 s"},
            "reward 0.2500 (last 10: 0.2000)",
        ),
    ],
)
def test_the_summary_ends_with_the_figure_that_says_something(tmp_path, values, text):
    """The loss of GRPO is 0 where the model that learns is the one that answered: its figure is the reward."""
    line = closing_summary(tmp_path, result(**values), 10, None).splitlines()[1]
    assert line == f"done: 7 of 10 steps, {text}"


def test_the_summary_says_how_to_go_on(tmp_path):
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "hf").mkdir()
    text = closing_summary(tmp_path, result(), 10, str(tmp_path / "hf"))
    assert f"checkpoint {tmp_path}/hf" in text and f"--initialize_from_hf {tmp_path}/hf" in text
    assert f"wandb sync {tmp_path}/wandb/offline-run-1" in text and f"events     {tmp_path}/tensorboard" in text


@pytest.mark.parametrize(
    ("saved", "text"), [(True, "stopped by a signal: 7"), (False, "stopped by a signal, no checkpoint was saved: 7")]
)
def test_a_run_that_a_signal_ended_says_whether_it_was_saved(tmp_path, saved, text):
    assert text in closing_summary(tmp_path, result(stopped_by=15), 10, str(tmp_path) if saved else None)


def test_errors_of_the_tracker_are_counted(tmp_path):
    assert "the tracker failed 3 times" in closing_summary(tmp_path, result(tracker_errors=3), 10, None)


def test_a_run_that_diverged_or_skipped_steps_says_so(tmp_path):
    text = closing_summary(tmp_path, result(diverged=True, skipped_steps=1), 10, None)
    assert "stopped before a step whose loss is not finite or a spike (trainer.on_nan): 7 of 10 steps" in text
    text = closing_summary(tmp_path, result(alarmed=True), 10, None)
    assert "stopped by an alarm (alarms.on_alarm), no checkpoint was saved: 7 of 10 steps" in text
    assert "3 steps were skipped, see train/skipped_step" in closing_summary(
        tmp_path, result(skipped_steps=3), 10, None
    )


def test_a_run_goes_on_in_the_same_wandb_run_on_a_machine_that_has_only_the_checkpoints(tmp_path, monkeypatch):
    ids = []

    def init(*, id=None, **_):
        ids.append(id)
        return FakeRun(id=id or f"made-{len(ids)}")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    bucket = CheckpointerConfig(base_path=str(tmp_path / "bucket"))
    for machine, checkpointer in (("a", bucket), ("b", bucket), ("c", None)):
        config = TrainerConfig(run_id="run", checkpointer=checkpointer, tracker=WandbTrackerConfig())
        start_tracker(config, tmp_path / machine / "run", {})
    assert ids == [None, "made-1", None]


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wandb, "init", lambda **_: FakeRun())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "run").mkdir()
    checkpointer = CheckpointerConfig(base_path=str(tmp_path / "file" / "checkpoints"))
    config = TrainerConfig(run_id="run", checkpointer=checkpointer, tracker=WandbTrackerConfig())
    start_tracker(config, tmp_path / "run", {})
    assert "wandb-run.json could not be read or written in" in caplog.text
    assert "would be a new run in W&B" in caplog.text
