"""Rows in buckets by length: one program for each length, the same on every host, and losses that padding is not in."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from lockstep.training import CheckpointerConfig, OptimizerConfig
from lockstep.training.data import PreferenceDataConfig
from lockstep.training.objectives import SimpoConfig
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import assert_same_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS, LENGTH = 8, 20


def write(path):
    """64 pairs; the answers of a quarter of them are long."""

    def chat(n, answer):
        return [{"role": "user", "content": f"What is {n} plus 7?"}, {"role": "assistant", "content": answer}]

    pairs = [{"chosen": chat(n, "forty " * (1 + 4 * (n % 4 == 0))), "rejected": chat(n, f"{n}")} for n in range(10, 74)]
    path.write_text("\n".join(json.dumps(pair) for pair in pairs))


class Padded:
    """The same batches, all of one length."""

    def __init__(self, rows):
        self._rows = rows

    def batch(self, step, batch_size, rows):
        batch = self._rows.batch(step, batch_size, rows)
        return {name: np.pad(one, ((0, 0), (0, 0), (0, LENGTH - one.shape[-1]))) for name, one in batch.items()}


def train(hosts, rows, directory=None, at=None, **values):
    """Losses by completed steps, and how often the train step was traced."""
    from lockstep.training import Trainer, TrainerConfig

    if directory is not None:
        values |= {"checkpointer": CheckpointerConfig(every=100), "log_dir": directory, "run_id": "run"}
    config = TrainerConfig(num_train_steps=STEPS, train_batch_size=8, **values)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0).build(STEPS)
    trainer = Trainer(config, optimizer, SimpoConfig(), hosts)
    losses = {}
    trainer.add_hook(lambda info: losses.update({info.next_step: info.loss}))
    if at is not None:
        trainer.add_hook(at)
    state = trainer.restore(tiny.init)
    with assert_same_launches(hosts):
        trainer.train(tiny.init_model(trainer) if state is None else state, rows)
    return list(losses.items()), trainer.train_step_traces


def body(hosts, directory):
    """Lengths of the steps; a run, the same interrupted and gone on with, and one without buckets."""

    def terminate(info):
        if info.next_step == 3 and hosts.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    config = PreferenceDataConfig(
        train_urls=(f"{directory}/x.jsonl",), cache_dir=f"{directory}/cache", max_seq_len=LENGTH, length_buckets=(4, 16)
    )
    rows = config.load(tiny.tokenizer(), 64, 0, hosts)
    return {
        "lengths": [rows.batch(step, 8, slice(0, 1))["tokens"].shape[-1] for step in range(STEPS)],
        "compiled": rows.lengths,
        "whole": train(hosts, rows),
        "before": train(hosts, rows, directory, terminate),
        "after": train(hosts, rows, directory),
        "padded": train(hosts, Padded(rows)),
    }


@pytest.mark.nightly  # in make slow: unit/training/data
def test_one_program_for_each_length_and_the_losses_of_rows_of_one_length(tmp_path):
    write(Path(tmp_path / "x.jsonl"))
    leader, other = run_processes(body, processes=2, devices=2, args=(str(tmp_path),), timeout_s=300)
    assert leader == other
    assert leader["lengths"].count(leader["lengths"][0]) < STEPS, "the batches have several lengths"
    assert sorted(set(leader["lengths"])) == leader["compiled"] == [16, 20]
    losses, traces = {}, {}
    for name in ("whole", "before", "after", "padded"):
        losses[name], traces[name] = dict(leader[name][0]), leader[name][1]
    assert traces == {"whole": 2, "before": 2, "after": 2, "padded": 1}
    assert len(losses["whole"]) == STEPS and 3 <= len(losses["before"]) < STEPS
    assert losses["before"] | losses["after"] == losses["whole"]
    np.testing.assert_allclose(list(losses["padded"].values()), list(losses["whole"].values()), rtol=1e-5)
