"""Runs that end early go on: on the same mesh bit for bit, on others to rounding; no save launches anything."""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.models import load_hf, save_hf
from lockstep.placement import mesh_of
from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints import checkpointer
from lockstep.training.checkpoints.config import KeepConfig
from tests import rollouts, tiny
from tests.clock import until
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = pytest.mark.multiprocess

STEPS = 6
MODELS = {"llama": tiny.CONFIG, "experts": dataclasses.replace(rollouts.EXPERTS, max_seq_len=tiny.CONFIG.max_seq_len)}


def train(hosts, directory, mesh_shape="auto", at=None, steps=STEPS, config=tiny.CONFIG, **values):
    """Losses by completed steps, how it ended, and the names of what was launched; no directory: no checkpoints."""
    if directory:
        values["checkpointer"] = CheckpointerConfig(every=2, keep=KeepConfig(newest=9))
    trainer = tiny.make_trainer(mesh_shape, steps, hosts, log_dir=str(directory), run_id="run", **values)
    losses = {}
    trainer.add_hook(lambda info: losses.update({info.next_step: info.loss}))
    if at is not None:
        trainer.add_hook(at)
    with record_launches() as launches:
        state = trainer.restore(functools.partial(tiny.init, config=config))
        assert not launches, "reading a checkpoint launches nothing"
        if state is None:
            state = tiny.init_model(trainer) if config is tiny.CONFIG else rollouts.drawn(config, trainer.mesh)
        launches.clear()
        result = trainer.train(state, tiny.rows())
    assert trainer.train_step_traces == 1
    return losses, result, sorted(set(launches))


def steps_in(directory):
    return checkpointer.CheckpointDirectory(f"{directory}/run/checkpoints").steps()


def body_resume(hosts, directory, model):
    """Losses without a break, before one, after it, and after it on another mesh; what was trained is exported."""
    config = MODELS[model]

    def terminate(info):
        if info.next_step == 3 and hosts.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    plain, ended, launched = train(hosts, None, config=config)
    first, stopped, launched_too = train(hosts, directory, at=terminate, config=config)
    assert (stopped.completed_steps, stopped.stopped_by, stopped.checkpoint_errors) == (4, signal.SIGTERM, 0)
    assert launched_too == launched, "a save launches nothing"
    if hosts.is_leader:
        shutil.copytree(Path(directory) / "run", Path(directory) / "copy" / "run")
    second, resumed, _ = train(hosts, directory, config=config)
    assert steps_in(directory) == [2, 4, 6]
    save_hf(resumed.model, f"{directory}/out", hosts=hosts)
    mesh = mesh_of(resumed.model.embed.array)
    read = load_hf(f"{directory}/out", mesh, hosts=hosts)
    for tree in (resumed.model, read):
        for mine, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(ended.model), strict=True):
            for part, other in zip(mine.addressable_shards, theirs.addressable_shards, strict=True):
                np.testing.assert_array_equal(part.data, other.data)
    third, _, _ = train(hosts, f"{directory}/copy", "1,2,2", config=config)
    return [list(losses.items()) for losses in (plain, first, second, third)]


def body_failure(hosts, directory):
    """Process 1 finds a file where it would write its part of step 2: orbax fails there, in its threads."""
    begin = checkpointer.CheckpointDirectory.begin

    def with_a_file_in_the_way(self, step):
        name = begin(self, step)
        if step == 2:
            (self.of(step) / name / "ocdbt.process_1").write_text("in the way")
        return name

    checkpointer.CheckpointDirectory.begin = with_a_file_in_the_way
    try:
        losses, result, _ = train(hosts, directory)
    finally:
        checkpointer.CheckpointDirectory.begin = begin
    return [len(losses), result.checkpoint_errors, steps_in(directory)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", pytest.param("experts", marks=pytest.mark.nightly)])
def test_a_run_goes_on_bit_for_bit_and_on_another_mesh_to_rounding(model, tmp_path):
    first, *others = run_processes(body_resume, processes=2, devices=2, args=(str(tmp_path), model))
    assert all(other == first for other in others)
    plain, before, after, elsewhere = (dict(losses) for losses in first)
    # The step at which the signal came had not called its hooks: the resumed run calls them first.
    assert sorted(before) == [1, 2, 3] and sorted(after) == sorted(elsewhere) == [4, 5, 6]
    assert before | after == plain
    np.testing.assert_allclose([elsewhere[step] for step in (4, 5, 6)], [plain[step] for step in (4, 5, 6)], rtol=1e-5)


KILLED_AT = 5
SLICES = {"steps": 8, "per_device_parallelism": 1}


def body_killed_slice(hosts, directory):
    """A run without a break, and one in which a process of the second slice is killed after the save of step 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGASCALE_NUM_SLICES", "2")
        plain, _, _ = train(hosts, None, **SLICES)
        if hosts.is_leader:
            Path(directory, "plain.json").write_text(json.dumps(list(plain.items())), encoding="utf-8")

        def kill(info):
            if info.next_step == KILLED_AT:
                until(lambda: 4 in steps_in(directory))
            if info.next_step == KILLED_AT and hosts.index == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        train(hosts, directory, at=kill, **SLICES)


def body_resumed_slices(hosts, directory):
    """The slice of this process, its part of the weights that were read, and the losses after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGASCALE_NUM_SLICES", "2")
        trainer = tiny.make_trainer(
            "auto", 8, hosts, log_dir=directory, run_id="run", checkpointer=CheckpointerConfig(every=2)
        )
        assert dict(trainer.mesh.shape) == {"dcn": 2, "dp": 1, "fsdp": 2, "tp": 1}
        state, digest = trainer.restore(tiny.init), hashlib.sha256()
        for leaf in jax.tree.leaves(state):
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
        losses, _, _ = train(hosts, directory, **SLICES)
        return [digest.hexdigest(), list(losses.items())]


def body_one_slice(hosts, directory):
    """What the slice that is left does, until somebody ends it."""

    def terminate(info):
        if info.next_step == 5 and hosts.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    losses, result, _ = train(hosts, directory, at=terminate, **SLICES)
    return [result.completed_steps, list(losses.items())]


@pytest.mark.nightly
def test_slices_share_the_writing_and_resume_alike_after_one_has_lost_a_process(tmp_path):
    with pytest.raises(AssertionError, match="process 3 failed, exit code 137, killed"):
        run_processes(
            body_killed_slice, processes=4, devices=1, args=(str(tmp_path),), timeout_s=200, own="it is killed"
        )
    assert steps_in(tmp_path) == [2, 4]
    parts = (tmp_path / "run" / "checkpoints" / "step-4").glob("*/ocdbt.process_*")
    written = [sum(file.stat().st_size for file in part.rglob("*") if file.is_file()) for part in parts]
    assert len(written) == 4 and max(written) < 1.1 * min(written), "slices share the writing"
    shutil.copytree(tmp_path / "run", tmp_path / "other" / "run")
    found = run_processes(body_resumed_slices, processes=4, devices=1, args=(str(tmp_path),), timeout_s=200)
    (first, losses), (second, _), *others = found
    assert [one for one, _ in others] == [first, second] and first != second, "every slice has all of the weights"
    assert all(each == losses for _, each in found)
    plain = json.loads((tmp_path / "plain.json").read_text())
    assert losses == [each for each in plain if each[0] > 4] and len(losses) == 4
    # Where the slice stays away, the other goes on with twice the microbatches, and both when it is there again.
    other = (str(tmp_path / "other"),)
    (completed, alone), _ = run_processes(body_one_slice, processes=2, devices=1, args=other, timeout_s=200)
    (_, both), *_ = run_processes(body_resumed_slices, processes=4, devices=1, args=other, timeout_s=200)
    assert completed == 6 and [step for step, _ in (*alone, *both)] == [5, 6, 7, 8]
    np.testing.assert_allclose([*alone, *both], plain[4:], rtol=1e-5)


@pytest.mark.slow  # between threads: tests/unit/training/checkpoints/test_checkpointer.py
def test_a_process_that_cannot_write_costs_one_checkpoint_and_nothing_else(tmp_path):
    assert run_processes(body_failure, processes=2, devices=2, args=(str(tmp_path),)) == [[STEPS, 1, [4, 6]]] * 2
