"""How often a process waits for the others: each wait is milliseconds on a pod, and a place where a job can hang."""

from unittest import mock

import numpy as np
import pytest

from lockstep.batch_inference import SampleConfig
from lockstep.batch_inference.generate import Generator
from lockstep.batch_inference.prompt_store import JobShape, encoded_lines, pending_units, store_prompts
from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.engine import Engine, EngineConfig, audit
from lockstep.hosts import Hosts
from lockstep.placement import make_mesh
from lockstep.text import iter_prompts
from tests import tiny
from tests.multiprocess.harness import run_processes

pytestmark = pytest.mark.slow


class Waits:
    """The keys that this process waits at, those of the gate left out, which is passed before each launch.

    Their numbers are left out too: they count on from other tests in the same processes.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._heartbeat = hosts._channel.heartbeat

    def of(self, function):
        keys = []
        wait_at = self._heartbeat.wait_at

        def note(key):
            keys.append(key.rpartition("/")[2].partition("#")[0])
            wait_at(key)

        with mock.patch.object(self._heartbeat, "wait_at", note):
            function()
        return [key for key in keys if not key.isdigit()]


def body(hosts):
    waits = Waits(hosts)
    mesh = make_mesh("auto")
    model = (tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size()))
    config = InferenceEvalConfig(
        prompts=["one plus two", "three"], max_new_tokens=4, eval_every=1, audit=True, skip_samples_table=True
    )
    callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
    found = {"rounds": [waits.of(lambda step=step: callback(tiny.Info(step, model))) for step in (1, 2)]}
    assert callback.rounds == 2

    requests = tiny.requests(lengths=(3, 9))
    engine, completions = Engine(EngineConfig(), mesh), []
    found["generate"] = waits.of(lambda: completions.extend(engine.generate(model, requests, hosts=hosts)))
    found["audit"] = waits.of(lambda: audit(model, requests, completions, hosts=hosts))

    return found | {"sampled": sample(hosts, model, mesh, waits)}


def sample(hosts, model, mesh, waits):
    """The waits of two batches of two prompts, as `lockstep sample` makes them."""
    prompts = ["one plus two", "three", "four plus five", "six"]
    config = SampleConfig(hf_checkpoint="unused", prompts=prompts, max_new_tokens=4, max_prompts_per_batch=2)
    lines = None
    if hosts.is_leader:
        lines = encoded_lines(iter_prompts(prompts), tiny.tokenizer(), max_seq_len=None, max_new_tokens=4)
    store = store_prompts(hosts, lines)
    shape = JobShape(rounds=1, prompts=len(store), generations=1)
    units = pending_units(shape, store.lengths, np.zeros(shape.units, bool))
    generator = Generator(hosts, config, store, tiny.tokenizer(), ())
    generator.prepare(model, mesh, shape, units)
    return waits.of(lambda: generator.run(shape, units, None, None))


@pytest.fixture(scope="module")
def found():
    (of_one, of_other) = run_processes(body, timeout_s=240)
    return [of_one, of_other]


def test_a_round_waits_at_six_places_and_once_for_its_audit(found):
    begin, end = "begin", "end"
    # The leader does not wait for its own broadcast.
    leader = [begin, "measure memory", "prepare", "generate", "audit", end]
    other = [begin, "prompts", "measure memory", "prepare", "generate", "audit", end]
    assert found[0]["rounds"] == [leader] * 2
    assert found[1]["rounds"] == [other] * 2


def test_the_engine_waits_three_times(found):
    assert [each["generate"] for each in found] == [["measure memory", "prepare", "generate"]] * 2
    assert [each["audit"] for each in found] == [["prepare", "audit"]] * 2


def test_a_batch_of_the_sampler_waits_once(found):
    """And once more when its rows are on disk; the last batch is empty."""
    for each in found:
        assert each["sampled"] == ["prepare", "generate", "write rows", "generate", "write rows", "generate"]
