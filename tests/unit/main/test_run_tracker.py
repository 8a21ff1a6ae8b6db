"""The tracker of a run that goes on."""

import wandb

from lockstep.main.run_tracker import start_tracker
from lockstep.report import WandbTrackerConfig
from lockstep.training import CheckpointerConfig, TrainerConfig
from tests.unit.report.trackers.fakes import FakeRun


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
