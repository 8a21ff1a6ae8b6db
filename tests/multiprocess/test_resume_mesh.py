"""``lockstep train-lm`` goes on with another number of tensor-parallel devices and processes; it trains in stages."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.harness import run_command
from tests.multiprocess.lm_run import checkpoints, losses, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
STEPS = 9
STAGES = [("1,1,1", 1, 1, 3), ("2,1,2", 2, 2, 6)]
"""``mesh_shape`` (data, FSDP, tensor parallel), processes, devices of each, and the checkpoint to go on from."""


def train(config, mesh_shape, processes, devices, resume):
    command = ["lockstep", "train-lm", "--config_path", str(config), "--trainer.mesh_shape", mesh_shape]
    command += ["--inference_eval.enabled", "false", "--resume", resume]
    run = run_command(command, cwd=ROOT, processes=processes, devices=devices, timeout_s=240)
    assert run.code == 0, run.output
    return run.output


def test_a_run_goes_on_with_another_tensor_parallel_size(tmp_path):
    config = write_config(tmp_path, "moved", STEPS, keep=STEPS)
    run = tmp_path / "moved"
    train(config, "1,2,2", 2, 2, "never")
    whole = losses(run)
    for mesh_shape, processes, devices, step in STAGES:
        for later in (each for each in checkpoints(run) if each > step):
            shutil.rmtree(run / "checkpoints" / f"step-{later}")
        output = train(config, mesh_shape, processes, devices, "must")
        assert f"goes on from step {step}: {run}/checkpoints/step-{step}" in output
        # The sums of other devices round differently: no more than that.
        found = losses(run)
        assert list(found) == list(whole) and found != whole
        np.testing.assert_allclose(list(found.values()), list(whole.values()), rtol=1e-5)


def test_a_run_in_stages_has_the_losses_and_samples_of_one_without(tmp_path, monkeypatch):
    """Each stage is a slice; the samples are of the weights of both."""
    found = {}
    for name, mesh_shape, slices in (("whole", "1,4,1", "1"), ("stages", "pp=2,fsdp=-1", "2")):
        monkeypatch.setenv("MEGASCALE_NUM_SLICES", slices)
        config = write_config(tmp_path, name, STEPS)
        command = ["lockstep", "train-lm", "--config_path", str(config), "--trainer.mesh_shape", mesh_shape]
        command += ["--trainer.per_device_parallelism", "1"]
        run = run_command(command, cwd=ROOT, processes=2, devices=2, timeout_s=240)
        assert run.code == 0, run.output
        samples = [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        found[name] = losses(tmp_path / name), [(row["step"], row["generated_text"]) for row in samples]
    np.testing.assert_allclose(*(list(each.values()) for each, _ in found.values()), rtol=1e-5)
    assert found["stages"][1] == found["whole"][1] and found["whole"][1]
