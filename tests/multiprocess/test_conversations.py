"""Conversations on several hosts: all have the same rows, a failure on one costs its groups, a kill costs nothing."""

import dataclasses
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.text import tool_calls
from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints.config import KeepConfig
from tests import environments, tiny
from tests import rollouts as runs
from tests.clock import until
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = pytest.mark.multiprocess

EXACT = dataclasses.replace(tiny.CONFIG, numerics="exact")
CALLS_LEFT: dict[str, int] = {}
"""The number of calls of environments that this process lives for; empty: it lives."""
COUNTING = threading.Lock()


def count_call():
    """Count a call of an environment; the last one kills the process."""
    with COUNTING:
        if CALLS_LEFT:
            CALLS_LEFT["calls"] -= 1
            if not CALLS_LEFT["calls"]:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(kw_only=True)
class Deadly(environments.Parity):
    """An environment whose calls are counted, before it begins and after it has replied."""

    async def reset(self, question: Any) -> Any:
        count_call()
        return await super().reset(question)

    async def step(self, message: Any) -> Any:
        reply = await super().step(message)
        count_call()
        return reply


def body_train(hosts):
    """Two steps; the environments of every second question raise in their second turn."""
    tracker = runs.Recorder()
    run = environments.run(fails="raise", every=2)
    return trained(tracker, runs.make("auto", 2, hosts, tracker=tracker, run=run))


def body_tools(hosts):
    """Two steps in which the model calls tools, and all messages of their conversations."""
    tracker, tokenizer = runs.Recorder(), environments.calling_tokenizer()
    run = {**environments.run(), "environment": environments.Products(timeout_s=20.0)}
    vocab = -(-len(tokenizer) // 4) * 4
    made = runs.make("auto", 2, hosts, tracker=tracker, run=run, vocab=vocab, tokenizer=tokenizer, row=64)
    sample, conversations = made[1]._sampler.sample, []

    def sampled(*given):
        rollout = sample(*given)
        conversations.extend(conversation.messages for conversation in rollout.conversations)
        return rollout

    made[1]._sampler.sample = sampled
    return {**trained(tracker, made), "conversations": conversations}


def trained(tracker, made):
    trainer, rollouts, model = made
    with record_launches() as launches:
        spy = runs.train(trainer, rollouts, model)
    assert trainer.tracker.flush(60)
    engine = {name: program.traces for name, program in rollouts.engine.programs.items()}
    scalars = {str(step): values for step, values in tracker.scalars.items()}
    return {"found": spy.found, "losses": spy.losses, "launches": launches, "engine": engine, "scalars": scalars}


@dataclasses.dataclass(frozen=True)
class Kill:
    """The moment of a kill: the process, the step before the rollout, and the number of calls of its environments."""

    victim: int
    after: int
    calls: int

    @classmethod
    def drawn(cls, seed):
        """A kill anywhere in the first or second turns of a rollout that follows no checkpoint, or one of step 3."""
        draw = random.Random(seed)
        share = runs.BATCH // 2  # the conversations of a host, each of which begins, and replies once or twice
        return cls(draw.randrange(2), draw.choice([2, 4]), draw.randint(1, 2 * share))


def body_until(hosts, directory, kill=None):
    """Six steps of two updates each from what is there, in exact numerics; a victim dies within a rollout."""
    CALLS_LEFT.clear()
    run = {**environments.run(), "environment": Deadly(timeout_s=20.0), "num_iterations": 2}
    trainer, rollouts, model = runs.make(
        "auto", 6, hosts, run=run, model=EXACT, log_dir=directory, run_id="run",
        checkpointer=CheckpointerConfig(every=3, keep=KeepConfig(newest=9)),
    )  # fmt: skip
    state = trainer.restore(lambda key: tiny.init(key, EXACT))
    losses = {}

    def note(info):
        losses[info.next_step] = float(info.loss).hex()
        if info.next_step == 4:
            until((Path(directory) / "run/checkpoints/step-3/metadata.json").exists)
        if kill is not None and (hosts.index, info.next_step) == (kill.victim, kill.after):
            CALLS_LEFT["calls"] = kill.calls

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
def test_hosts_hear_the_same_calls_of_tools_and_their_results():
    leader, other = run_processes(body_tools, processes=2, devices=2, timeout_s=240)
    for name in ("found", "losses", "launches", "engine", "conversations"):
        assert leader[name] == other[name], name
    results = set()
    for asked, *replies in (messages for messages in leader["conversations"] if len(messages) > 1):
        calls = tool_calls(asked["content"])
        results.update(reply.get("name") for reply in replies if reply["role"] == "tool")
        for call, reply in zip(calls, replies, strict=False):
            product = (
                str(3 * call.arguments["a"]) if call.name == "multiply" else "error: LookupError: there is no tool"
            )
            assert reply["role"] == "tool" and reply["content"].startswith(product)
    assert results == {"multiply", "divide"}
    assert leader["scalars"]["1"]["reward/environment/failed"] == 0 and leader["scalars"]["1"]["reward/std"] > 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The losses and the rollouts of a run that nothing has ended."""
    directory = tmp_path_factory.mktemp("unbroken")
    losses, others = run_processes(body_until, processes=2, devices=2, args=(str(directory),), timeout_s=240)
    assert losses == others and sorted(losses) == list("123456")
    return losses, (directory / "run" / "rollouts.jsonl").read_bytes()


@pytest.mark.nightly  # in make slow: test_killed.py, and a rollout in test_train_grpo.py
@pytest.mark.parametrize("seed", [6, 0, 1, 2, 3])
def test_a_process_that_is_killed_in_a_conversation_goes_on_bit_for_bit(tmp_path, unbroken, seed):
    kill, (losses, rows) = Kill.drawn(seed), unbroken
    print(f"seed {seed}: {kill}")
    with pytest.raises(AssertionError, match=f"process {kill.victim} failed, .*SIGKILL"):
        run_processes(body_until, processes=2, devices=2, args=(str(tmp_path), kill), timeout_s=240, own="it is killed")
    rest, others = run_processes(body_until, processes=2, devices=2, args=(str(tmp_path),), timeout_s=240)
    first = {2: 1, 4: 4}[kill.after]
    assert rest == others == {step: losses[step] for step in map(str, range(first, 7))}
    assert (tmp_path / "run" / "rollouts.jsonl").read_bytes() == rows and b'"turns"' in rows
