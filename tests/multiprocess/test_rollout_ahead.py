"""`rollout_ahead`: its schedule against one written down plainly, the launches of all hosts, and runs that end."""

import contextlib
import dataclasses
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints.config import KeepConfig
from lockstep.training.rl import groups
from lockstep.training.rl.rewards import FunctionReward, LengthReward
from tests import rollouts as runs
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS, RATE = 4, 0.5


def body_run(hosts, ahead):
    """What was learned from, the losses, and what was launched, of a run with and without ``rollout_ahead``."""
    import optax

    trainer, rollouts, model = runs.make(
        "auto", STEPS, hosts, loss=runs.AHEAD, run={"rollout_ahead": ahead}, optimizer=optax.sgd(RATE)
    )
    first = hosts.ledger.count
    with record_launches() as launches:
        spy = runs.train(trainer, rollouts, model)
    own = [[name, digest] for number, name, digest in hosts.ledger.last() if number >= first]
    return {"found": spy.found, "losses": spy.losses, "launches": launches, "own": own}


def body_reference(hosts):
    """The schedule in a plain loop: rollout n is answered by the weights before update n - 1, then learned from."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    from lockstep.engine import Engine
    from lockstep.models import as_trainable
    from lockstep.placement import make_mesh
    from lockstep.text import stop_ids, token_count
    from lockstep.types import Request

    mesh = make_mesh()
    model = as_trainable(tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size()))
    fields, questions, tokenizer = runs.fields(), runs.questions(), tiny.tokenizer()
    engine = Engine(fields.rollout.engine_config("float32", runs.ROW), mesh, vocab_size=token_count(tokenizer))
    objective, optimizer = runs.objective_of(fields, **runs.AHEAD), optax.sgd(RATE)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, batch):
        parts = objective(model, batch)
        return parts.total / parts.weight

    weights, state = [model], optimizer.init(model)
    found, losses = [], []
    for number in range(STEPS):
        seed = int(np.random.SeedSequence((0, 0, number, 0)).generate_state(1)[0])
        params = dataclasses.replace(fields.rollout.sampling_params(stop_ids(tokenizer)), seed=seed)
        asked = [questions.tokens[question] for question in questions.drawn(number, runs.BATCH // runs.GROUP)]
        requests = [Request(prompt_id=i, prompt_tokens=each, params=params) for i, each in enumerate(asked)]
        answers = engine.generate(weights[max(0, number - 1)], requests, hosts=hosts)
        batch = {
            "tokens": np.zeros((runs.BATCH, runs.ROW), np.int32),
            "loss_mask": np.zeros((runs.BATCH, runs.ROW), bool),
            "advantage": np.zeros(runs.BATCH, np.float32),
            "rollout_logprobs": np.zeros((runs.BATCH, runs.ROW), np.float32),
        }
        rewards = np.zeros(runs.BATCH)
        for row, answer in enumerate(answers):
            prompt = asked[row // runs.GROUP]
            own = slice(len(prompt), len(prompt) + len(answer.tokens))
            batch["tokens"][row, : len(prompt)] = prompt
            batch["tokens"][row, own] = answer.tokens
            batch["loss_mask"][row, own] = True
            batch["rollout_logprobs"][row, own] = answer.sampled_logprobs
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            rewards[row] = (text.count("e") % 2 == 0) - 0.5 * len(answer.tokens) / runs.NEW
        groups = rewards.reshape(-1, runs.GROUP)
        deviation = groups.std(axis=1, keepdims=True, ddof=1)
        centred = groups - groups.mean(axis=1, keepdims=True)
        batch["advantage"][:] = np.where(deviation > 1e-6, centred / (deviation + 1e-4), 0).reshape(-1)
        value, gradients = loss(weights[-1], jax.tree.map(jnp.asarray, batch))
        updates, state = optimizer.update(gradients, state)
        weights.append(optax.apply_updates(weights[-1], updates))
        losses.append(float(value))
        found.append({name: column.tolist() for name, column in batch.items()})
    return {"found": found, "losses": losses}


def test_a_rollout_is_that_of_the_weights_before_the_last_update_on_every_host():
    ahead = run_processes(body_run, processes=2, devices=2, args=(1,), timeout_s=300)
    plain = run_processes(body_run, processes=2, devices=2, args=(0,), timeout_s=300)
    (reference,) = run_processes(body_reference, processes=1, devices=1, timeout_s=300)
    assert ahead[0] == ahead[1], "tokens, rows, losses, and every launch in its order"
    for number in range(STEPS):
        runs.assert_close(ahead[0]["found"][str(number)], reference["found"][number])
    np.testing.assert_allclose(ahead[0]["losses"], reference["losses"], rtol=1e-4, atol=1e-5)
    # The schedule is what the reference tells apart: without rollout_ahead other weights answer from step 1 on.
    assert ahead[0]["found"]["0"] == plain[0]["found"]["0"]
    for number in range(1, STEPS):
        with pytest.raises(AssertionError):
            runs.assert_close(plain[0]["found"][str(number)], reference["found"][number])
    assert rollouts_before_each_update(ahead[0]["own"]) == [2, 1, 1, 0, 0]
    assert rollouts_before_each_update(plain[0]["own"]) == [1, 1, 1, 1, 0]


def rollouts_before_each_update(launches):
    """The number of rollouts that were sampled before each train step, and after the last one."""
    found = [0]
    for name, _ in launches:
        if name == "train_step":
            found.append(0)
        found[-1] += name == "new_cache"
    return found


def body_resume(hosts, directory):
    """A run without a break; and one that is asked to end while it samples ahead, goes on, ends between two updates of
    a rollout, and goes on. And one that goes on from its third step, as after a kill.
    """
    # Four sequences at a time, so that a rollout has several launches.
    run = {"rollout_ahead": 1, "num_iterations": 2, "rollout": {"max_seqs": 4}}
    run["rewards"] = [FunctionReward(function="tests.rollouts:parity"), LengthReward(weight=-0.5)]
    steps, ahead = 6, {}

    def train(where, ending=None, at=None):
        values = {"checkpointer": CheckpointerConfig(every=1, keep=KeepConfig(newest=9))} if where else {}
        trainer, rollouts, model = runs.make(
            "auto", steps, hosts, run=run, loss=runs.AHEAD, log_dir=str(where or directory), run_id="run", **values
        )
        state, losses = trainer.restore(tiny.init), {}
        if trainer.resumed_from is not None:
            kept = trainer.resumed_from.hooks["rollouts"]["ahead"]
            ahead[trainer.resumed_from.step] = None if kept is None else kept["number"]
        trainer.add_hook(lambda info: losses.update({info.next_step: float(info.loss).hex()}))
        if at is not None:
            trainer.add_hook(
                lambda info: info.next_step == at and hosts.index == 1 and os.kill(os.getpid(), signal.SIGTERM)
            )
        answered = groups._Scored.answered

        def answered_and_end(scored, completions):
            if scored.step == ending and hosts.index == 1 and any(answer.prompt_id == 1 for answer in completions):
                os.kill(os.getpid(), signal.SIGTERM)
            answered(scored, completions)

        with mock.patch.object(groups._Scored, "answered", answered_and_end), contextlib.closing(rollouts):
            result = trainer.train(model if state is None else state, rollouts)
        return losses, [result.completed_steps, result.stopped_by, result.checkpoint_errors]

    plain, _ = train(None)
    where = Path(directory) / "broken"
    first, in_rollout = train(where, ending=5)  # the rollout that is learned from at step 5 is sampled before step 3
    hosts.barrier("before the copy")
    if hosts.is_leader:  # as a kill leaves it: the last checkpoint is that of step 1, between two updates
        copy = Path(directory) / "killed" / "run"
        shutil.copytree(where / "run", copy)
        shutil.rmtree(copy / "checkpoints" / "step-2")
    hosts.barrier("after the copy")
    second, between = train(where, at=3)
    third, _ = train(where)
    killed, _ = train(Path(directory) / "killed")
    losses = [list(each.items()) for each in (plain, first, second, third, killed)]
    return {"losses": losses, "ends": [in_rollout, between], "ahead": sorted(ahead.items())}


@pytest.mark.nightly
def test_what_was_sampled_ahead_goes_into_checkpoints(tmp_path):
    results = run_processes(body_resume, processes=2, devices=2, args=(str(tmp_path),), timeout_s=400)
    assert results[0] == results[1]
    plain, first, second, third, killed = (dict(losses) for losses in results[0]["losses"])
    assert sorted(plain) == [1, 2, 3, 4, 5, 6]
    assert results[0]["ends"] == [[2, signal.SIGTERM, 0], [4, signal.SIGTERM, 0]]
    assert [sorted(each) for each in (first, second, third)] == [[1, 2], [3], [4, 5, 6]]
    assert first | second | third == plain
    assert sorted(killed) == [2, 3, 4, 5, 6] and killed == {step: plain[step] for step in killed}
    # By the step that a run went on from, the number of the rollout that had been sampled ahead by then.
    assert results[0]["ahead"] == [[1, 1], [2, 1], [4, 2]]
