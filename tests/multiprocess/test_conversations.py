"""Conversations on several hosts: all have the same rows, a failure on one costs its groups, a kill costs nothing."""

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import haliax as hax
import numpy as np
import pytest

from lockstep.models import LlamaLMHeadModel
from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints.config import KeepConfig
from tests import environments, tiny
from tests import rollouts as runs
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches
from tests.multiprocess.test_train_grpo import train_demo

pytestmark = pytest.mark.multiprocess

EXACT = dataclasses.replace(tiny.CONFIG, numerics="exact")
ARMED = {"kill": False}
"""Whether the next second turn kills its process."""


@dataclasses.dataclass(kw_only=True)
class Deadly(environments.Parity):
    """An environment in whose second turn the process dies once it is told to."""

    async def step(self, message: Any) -> Any:
        reply = await super().step(message)
        if self.turn == 2 and ARMED["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply


def body_train(hosts):
    """Two steps; the environments of every second question raise in their second turn."""
    tracker = runs.Recorder()
    run = environments.run(fails="raise", every=2)
    trainer, rollouts, model = runs.make("auto", 2, hosts, tracker=tracker, run=run)
    with record_launches() as launches:
        spy = runs.train(trainer, rollouts, model)
    assert trainer.tracker.flush(60)
    engine = {name: program.traces for name, program in rollouts.engine.programs.items()}
    scalars = {str(step): values for step, values in tracker.scalars.items()}
    return {"found": spy.found, "losses": spy.losses, "launches": launches, "engine": engine, "scalars": scalars}


def body_until(hosts, directory, victim=None):
    """Six steps of two updates each from what is there, in exact numerics; a victim dies in the rollout of step 5."""
    ARMED["kill"] = False
    run = {**environments.run(), "environment": Deadly(timeout_s=20.0), "num_iterations": 2}
    trainer, rollouts, model = runs.make(
        "auto", 6, hosts, run=run, model=EXACT, log_dir=directory, run_id="run",
        checkpointer=CheckpointerConfig(every=3, keep=KeepConfig(newest=9)),
    )  # fmt: skip
    vocab = hax.Axis("vocab", tiny.vocab_size())
    state = trainer.restore(lambda key: LlamaLMHeadModel.init(vocab, EXACT, key=key))
    losses = {}

    def note(info):
        losses[info.next_step] = float(info.loss).hex()
        deadline = time.monotonic() + 60
        while info.next_step == 4 and not (Path(directory) / "run/checkpoints/step-3/metadata.json").exists():
            assert time.monotonic() < deadline, "the checkpoint of step 3 is not complete"
            time.sleep(0.01)
        ARMED["kill"] = hosts.index == victim and info.next_step == 4

    trainer.add_hook(note)
    trainer.train(model if state is None else state, rollouts)
    return losses


@pytest.mark.slow
def test_hosts_have_the_same_conversations_and_a_failure_costs_its_group():
    leader, other = run_processes(body_train, processes=2, devices=2, timeout_s=240)
    for name in ("found", "losses", "launches", "engine"):
        assert leader[name] == other[name], name
    assert set(leader["engine"].values()) == {1}, "programs are traced once, whatever comes"
    mask = np.array(leader["found"]["0"]["loss_mask"])
    parts = (np.diff(mask.astype(int), axis=1) == 1).sum(axis=1)
    assert {0, 2} <= set(parts.tolist()) <= {0, 1, 2}, "rows with two answers, and rows with none to learn from"
    values = leader["scalars"]["1"]
    failed, dropped = values["reward/environment/failed"], values["rollout/groups_dropped"]
    assert 0 < failed < runs.BATCH and 0 < dropped < 1 and values["rollout/turns_mean"] > 1
    assert (parts == 0).sum() == dropped * runs.BATCH and values["time/wait_for_environments_s"] >= 0


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_conversation_goes_on_bit_for_bit(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    losses, others = run_processes(body_until, processes=2, devices=2, args=(str(unbroken),), timeout_s=240)
    assert losses == others and sorted(losses) == list("123456")
    with pytest.raises(AssertionError, match="process 1 failed, .*SIGKILL"):
        run_processes(body_until, processes=2, devices=2, args=(str(broken), 1), timeout_s=240, own="it is killed")
    rest, others = run_processes(body_until, processes=2, devices=2, args=(str(broken),), timeout_s=240)
    assert rest == others == {step: losses[step] for step in "456"}
    rows = [(each / "run" / "rollouts.jsonl").read_bytes() for each in (unbroken, broken)]
    assert rows[0] == rows[1] and b'"turns"' in rows[0]


@pytest.mark.nightly
def test_the_command_trains_on_the_example(tmp_path):
    """In chats, with a model that has learned nothing: its stop tokens end an answer soon."""
    shutil.copy("examples/calculator.py", tmp_path)
    config = Path(shutil.copy("config/grpo_demo.yaml", tmp_path))
    rewards = "rewards:\n  - type: exact_match # the answer in words, as text\n"
    text = config.read_text(encoding="utf-8").replace(rewards, "").replace("data/", f"{Path.cwd()}/data/")
    config.write_text(text, encoding="utf-8")
    environment = {"type": "calculator:Calculator", "max_turns": 2}
    arguments = ["--environment", json.dumps(environment), "--data.format", "chat", "--data.max_seq_len", "160"]
    arguments += ["--rollout.stop_token_ids", json.dumps(environments.STOPS), "--trainer.num_train_steps", "2"]
    train_demo(
        tmp_path, "run", *arguments, "--inference_eval.enabled", "false", "--hf_save_path", "null", config=config
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert rows and all([turn["role"] for turn in row["turns"]][:2] == ["user", "assistant"] for row in rows)
