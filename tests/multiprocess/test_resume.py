"""Runs that end early go on: on the same mesh bit for bit, on others to rounding; no save launches anything."""

import os
import shutil
import signal
from pathlib import Path

import haliax as hax
import numpy as np
import pytest

from lockstep.models import LlamaLMHeadModel
from lockstep.training import CheckpointerConfig, KeepConfig
from lockstep.training.checkpoints import checkpointer
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = pytest.mark.multiprocess

STEPS = 6


def init(key):
    return LlamaLMHeadModel.init(hax.Axis("vocab", tiny.vocab_size()), tiny.CONFIG, key=key)


def train(hosts, directory, mesh_shape="auto", at=None):
    """Losses by completed steps, how it ended, and the names of what was launched; no directory: no checkpoints."""
    values = {"checkpointer": CheckpointerConfig(every=2, keep=KeepConfig(newest=9))} if directory else {}
    trainer = tiny.make_trainer(mesh_shape, STEPS, hosts, log_dir=str(directory), run_id="run", **values)
    losses = {}
    trainer.add_hook(lambda info: losses.update({info.next_step: info.loss}))
    if at is not None:
        trainer.add_hook(at)
    with record_launches() as launches:
        state = trainer.restore(init)
        assert not launches, "reading a checkpoint launches nothing"
        model = tiny.init_model(trainer) if state is None else state
        launches.clear()
        result = trainer.train(model, tiny.rows())
    assert trainer.train_step_traces == 1
    return losses, result, sorted(set(launches))


def steps_in(directory):
    return checkpointer.CheckpointDirectory(f"{directory}/run/checkpoints").steps()


def body_resume(hosts, directory):
    """Losses without a break, before one, after it, and after it on another mesh."""

    def terminate(info):
        if info.next_step == 3 and hosts.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    plain, _, launched = train(hosts, None)
    first, stopped, launched_too = train(hosts, directory, at=terminate)
    assert (stopped.completed_steps, stopped.stopped_by, stopped.checkpoint_errors) == (4, signal.SIGTERM, 0)
    assert launched_too == launched, "a save launches nothing"
    if hosts.is_leader:
        shutil.copytree(Path(directory) / "run", Path(directory) / "copy" / "run")
    second, _, _ = train(hosts, directory)
    assert steps_in(directory) == [2, 4, 6]
    third, _, _ = train(hosts, f"{directory}/copy", "1,2,2")
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
def test_a_run_goes_on_bit_for_bit_and_on_another_mesh_to_rounding(tmp_path):
    first, *others = run_processes(body_resume, processes=2, devices=2, args=(str(tmp_path),))
    assert all(other == first for other in others)
    plain, before, after, elsewhere = (dict(losses) for losses in first)
    # The step at which the signal came had not called its hooks: the resumed run calls them first.
    assert sorted(before) == [1, 2, 3] and sorted(after) == sorted(elsewhere) == [4, 5, 6]
    assert before | after == plain
    np.testing.assert_allclose([elsewhere[step] for step in (4, 5, 6)], [plain[step] for step in (4, 5, 6)], rtol=1e-5)


def test_a_process_that_cannot_write_costs_one_checkpoint_and_nothing_else(tmp_path):
    assert run_processes(body_failure, processes=2, devices=2, args=(str(tmp_path),)) == [[STEPS, 1, [4, 6]]] * 2
