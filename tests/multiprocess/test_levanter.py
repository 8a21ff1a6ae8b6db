"""Our hook in real Levanter runs on real processes: losses, launches, tracker, schedule, its other hooks."""

import json
from pathlib import Path

import levanter.tracker
import pytest
from harness import run_processes
from launches import record_launches
from levanter.tracker import NoopConfig

import lockstep.levanter
from lockstep.callback import InferenceEvalConfig
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


def body_same_losses(hosts, directory, mesh):
    found = {}
    for name in ("plain", "sampled"):
        losses, made = [], []

        def add_hooks(trainer, state, losses=losses, made=made, name=name):
            trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
            if name == "sampled":
                made.append(lockstep.levanter.sample_callback(SAMPLING, tiny.tokenizer(), trainer, model=state.model))
                trainer.add_hook(made[0], every=EVERY)

        tracker = {} if name == "sampled" else {"tracker": NoopConfig()}
        config = runs.trainer_config(Path(directory) / name, STEPS, MESHES[mesh], **tracker)
        with record_launches() as launches:
            runs.train(config, add_hooks)
        found[name] = {"losses": losses, "launches": launches}
    sampler = made[0].sampler
    found["rounds"], found["report_errors"] = sampler.rounds, sampler.report_errors
    found["ledger"] = sampler.engine.ledger.launches
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
    tables = sorted((tmp_path / "sampled").rglob("*.table.json"), key=lambda path: len(path.read_text()))
    assert len(tables) == STEPS // EVERY
    table = json.loads(tables[-1].read_text())
    assert len(table["data"]) == 6 * STEPS // EVERY
    assert sorted({row[table["columns"].index("step")] for row in table["data"]}) == [5, 10, 15, 20]


def assert_same_launches(one, two):
    assert one == two, [pair for pair in zip(one, two, strict=False) if pair[0] != pair[1]][:5]
