"""Our hook in real Levanter runs on real processes: losses, launches, tracker, schedule, its other hooks."""

import json
from pathlib import Path

import jax
import levanter.tracker
import pytest
from harness import run_processes
from launches import record_launches
from levanter.tracker import NoopConfig, NoopTracker, current_tracker

import lockstep.levanter
from lockstep.callback import InferenceEvalConfig
from lockstep.errors import LaunchMismatchError
from lockstep.hosts import leader_only
from tests import tiny
from tests.multiprocess import levanter_runs as runs

pytestmark = pytest.mark.multiprocess

STEPS, EVERY = 20, 5
SAMPLING = InferenceEvalConfig(
    prompts=["What is 12 plus 7?", "What is 40 in words?", "one"],
    max_new_tokens=8,
    temperature=0.8,
    n_generations=2,
    on_error="raise",
)
MESHES = {"fsdp": runs.FSDP, "tensor": runs.TENSOR}


class NaiveTracker:
    """Logs as one would: through ``levanter.tracker.log``, which launches a program on all devices."""

    def log(self, metrics, *, step):
        levanter.tracker.log(metrics, step=step)

    def log_rows(self, name, rows, *, step):
        pass


def leader_logs_alone(hosts, mesh):
    """What ``levanter.tracker.log`` of the leader alone launches under the global mesh; whether our scope lets it."""
    refused = False
    with current_tracker(NoopTracker()), jax.set_mesh(mesh):
        with record_launches() as launches:
            if hosts.is_leader:
                levanter.tracker.log({"loss": 1.0}, step=1)
        if hosts.is_leader:
            try:
                with leader_only():
                    levanter.tracker.log({"loss": 1.0}, step=1)
            except LaunchMismatchError:
                refused = True
    return {"launches": launches, "refused": refused}


def body_same_losses(hosts, directory, mesh):
    found = {}
    runs.examples()
    for name in ("plain", "sampled"):
        losses, made = [], []

        def add_hooks(trainer, state, losses=losses, made=made, name=name):
            trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
            if name == "sampled":
                made.append(lockstep.levanter.sample_callback(SAMPLING, tiny.tokenizer(), trainer, model=state.model))
                trainer.add_hook(made[0], every=EVERY)
                made.append(lockstep.levanter.sample_callback(SAMPLING, tiny.tokenizer(), trainer, name="naive"))
                made[1].sampler._tracker = NaiveTracker()
                trainer.add_hook(made[1], every=STEPS)

        tracker = {} if name == "sampled" else {"tracker": NoopConfig()}
        config = runs.trainer_config(Path(directory) / name, STEPS, MESHES[mesh], **tracker)
        with record_launches() as launches:
            runs.train(config, add_hooks)
        found[name] = {"losses": losses, "launches": launches}
    sampler = made[0].sampler
    found["rounds"], found["report_errors"] = sampler.rounds, sampler.report_errors
    found["ledger"] = sampler.engine.ledger.launches
    found["naive"] = [made[1].sampler.rounds, made[1].sampler.report_errors]
    found["trap"] = leader_logs_alone(hosts, config.device_mesh)
    found["traces"] = {name: program.traces for name, program in sampler.engine.programs.items()}
    return found


@pytest.mark.parametrize("mesh", ["fsdp", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_run_with_samples_has_the_same_losses_and_launches(mesh, tmp_path):
    results = run_processes(body_same_losses, args=(str(tmp_path), mesh), timeout_s=400)
    for result in results:
        plain, sampled = result["plain"], result["sampled"]
        assert len(set(plain["losses"])) > STEPS // 2
        assert sampled["losses"] == plain["losses"]
        assert result["rounds"] == STEPS // EVERY
        assert set(result["traces"].values()) == {1}
    leader, other = results
    assert leader["report_errors"] == 0
    assert leader["sampled"]["losses"] == other["sampled"]["losses"]
    assert leader["ledger"] == other["ledger"] and "decode" in leader["ledger"]
    assert_same_launches(leader["plain"]["launches"], other["plain"]["launches"])
    assert_same_launches(leader["sampled"]["launches"], other["sampled"]["launches"])
    assert leader["trap"]["launches"] and leader["trap"]["refused"]
    with pytest.raises(AssertionError):
        assert_same_launches(leader["trap"]["launches"], other["trap"]["launches"])
    assert leader["naive"] == [1, 1] and other["naive"] == [1, 0]  # refused by the scope: no launch, one report error
    tables = sorted((tmp_path / "sampled").rglob("*.table.json"), key=lambda path: len(path.read_text()))
    assert len(tables) == STEPS // EVERY
    table = json.loads(tables[-1].read_text())
    assert len(table["data"]) == 6 * STEPS // EVERY
    assert sorted({row[table["columns"].index("step")] for row in table["data"]}) == [5, 10, 15, 20]


def assert_same_launches(one, two):
    assert one == two, [pair for pair in zip(one, two, strict=False) if pair[0] != pair[1]][:5]
