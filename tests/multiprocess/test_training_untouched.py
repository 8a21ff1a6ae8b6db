"""Sampling inside training changes nothing about it: losses bit for bit, traces, memory, launches on every host."""

import gc
import json
import math

import jax
import pytest

from lockstep.callback import InferenceEvalConfig, SampleCallback
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches
from tests.rollouts import Recorder

STEPS, EVERY = 18, 6
PROMPTS = [{"prompt": "What is 12 plus 7?", "answer": "nineteen"}, "What is 40 in words?", "one"]


def live_arrays():
    """Shape and local bytes of every array on this process's devices; looking must not make new ones."""
    gc.collect()
    found = []
    for array in jax.live_arrays():
        shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        found.append([list(array.shape), str(array.dtype), shard * len(array.sharding.addressable_devices)])
    return sorted(found)


class Loop(SampleCallback):
    """The callback, with a look at the device memory around each round."""

    memory: list

    def _round(self, step, model):
        before = live_arrays()
        super()._round(step, model)
        self.memory.append((before, live_arrays()))


def train(hosts, mesh_shape, layout):
    """One run; without samples where ``layout`` is None."""
    trainer = tiny.make_trainer(mesh_shape, STEPS, hosts)
    losses = []
    trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
    found = {}
    if layout is not None:
        config = InferenceEvalConfig(
            eval_every=EVERY,
            prompts=PROMPTS,
            max_new_tokens=10,
            temperature=0.8,
            n_generations=2,
            layout=layout,
            on_error="raise",
        )
        tracker = Recorder("inference_eval/samples")
        callback = Loop(config, tiny.tokenizer(), tracker=tracker, hosts=hosts)
        callback.memory = []
        trainer.add_hook(callback)
    model = tiny.init_model(trainer)
    with record_launches() as launches:
        trainer.train(model, tiny.rows())
    if layout is not None:
        found = {
            "rounds": callback.rounds,
            "report_errors": callback.report_errors,
            "traces": {name: program.traces for name, program in callback.engine.programs.items()},
            "ledger": callback.engine.ledger.launches,
            "memory": callback.memory,
            "rows": [row.to_dict() for row in tracker.rows],
            "scalars": sorted(tracker.scalars.get(EVERY, {})),
        }
    return found | {"losses": losses, "train_step_traces": trainer.train_step_traces, "launches": launches}


def body(hosts, mesh_shape, layout):
    return [train(hosts, mesh_shape, None), train(hosts, mesh_shape, layout)]


@pytest.mark.parametrize(
    ("processes", "mesh_shape", "layout"),
    [
        (2, "auto", "auto"),
        pytest.param(2, "auto", "training", marks=pytest.mark.slow),
        pytest.param(2, "1,2,2", {"tensor": 2}, marks=pytest.mark.nightly),
        pytest.param(4, "host_local", "auto", marks=pytest.mark.nightly),
    ],
)
def test_losses_are_equal_bit_for_bit(processes, mesh_shape, layout):
    results = run_processes(body, processes=processes, timeout_s=300, args=(mesh_shape, layout))
    for plain, sampled in results:
        assert len(plain["losses"]) == STEPS
        assert sampled["losses"] == plain["losses"]
        assert plain["train_step_traces"] == sampled["train_step_traces"] == 1
        assert sampled["rounds"] == STEPS // EVERY
        assert set(sampled["traces"].values()) == {1}
        assert [after for _, after in sampled["memory"]] == [before for before, _ in sampled["memory"]]
        assert len(sampled["memory"]) == STEPS // EVERY
    leader, *others = results
    for other in others:
        assert other[0]["losses"] == leader[0]["losses"]
        for run in (0, 1):
            assert other[run]["launches"] == leader[run]["launches"]
        assert other[1]["ledger"] == leader[1]["ledger"]
        assert other[1]["rows"] == []  # one table, from the leader
    assert leader[1]["report_errors"] == 0
    rows = leader[1]["rows"]
    assert len(rows) == len(PROMPTS) * 2 * (STEPS // EVERY)
    assert json.dumps(rows[0]) and {"step", "prompt_id", "generated_text", "mean_logprob"} <= set(rows[0])
    assert sorted({row["step"] for row in rows}) == list(range(EVERY, STEPS + 1, EVERY))
    assert "inference_eval/time/generate_s" in leader[1]["scalars"]
