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
