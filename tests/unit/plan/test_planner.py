"""Engines are planned for the memory that a run sizes them for; the compiler's part is in tests/tpu_compile."""

import os
import signal
import threading
from types import SimpleNamespace

import jax
import pytest

from lockstep import exits
from lockstep.engine import EngineConfig
from lockstep.errors import CapacityError
from lockstep.placement import make_mesh
from lockstep.plan import planner
from lockstep.plan.planner import predict_sampling
from lockstep.plan.workload import InfeasibleError, SamplingWorkload
from lockstep.training.rl.conversations import longest_turns
from lockstep.types import SamplingParams
from tests.unit.plan.test_train_step import workload_of

GIB = 1 << 30


def sampling(limit):
    engine = EngineConfig(memory_bytes_per_device=limit)
    return SamplingWorkload(name="inference_eval", engine=engine, engine_block="inference_eval.engine", requests=[])


class Sized:
    """An engine that needs half of the memory that it is sized for."""

    def __init__(self, config, mesh, **options):
        self.programs = {"decode": SimpleNamespace(text=lambda: "", digest="d", memory=self.memory)}

    def memory(self):
        return SimpleNamespace(generated_code_size_in_bytes=0)

    def prepare(self, decoder, requests, *, free):
        if free < GIB:
            raise CapacityError(f"too long for {free}")
        self.sizing = self.predict(decoder, requests, free=free)

    def predict(self, decoder, requests, *, free):
        return SimpleNamespace(free=free, compiled=SimpleNamespace(total=free // 2), predicted=None)


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr(planner, "Engine", Sized)
    for name in ("draft_bytes", "collectives"):
        monkeypatch.setattr(planner, name, lambda *rest: [])
    for name in ("Hlo", "vmem"):
        monkeypatch.setattr(planner, name, lambda *rest: None)
    mesh = make_mesh("1,1,1", jax.devices()[:1])

    def planned(limit, left):
        return planner._plan_sampling(workload_of(), sampling(limit), mesh, None, None, left, [0])

    return planned


def test_an_engine_is_sized_for_its_limit_or_for_what_is_left(plan):
    assert plan(None, 8 * GIB).sizing.free == 8 * GIB
    assert plan(2 * GIB, 8 * GIB).sizing.free == 2 * GIB
    assert plan(12 * GIB, 8 * GIB).sizing.free == 12 * GIB, "as in the run: what it needs is there"


def test_an_engine_that_fits_its_limit_alone_is_refused(plan):
    with pytest.raises(InfeasibleError, match=r"which sampling is sized: it needs 8589934592 bytes .* most 4294967296"):
        plan(16 * GIB, 4 * GIB)
    with pytest.raises(InfeasibleError) as refused:
        plan(16 * GIB, 4 * GIB)
    found = refused.value.infeasibility
    assert (found.key, found.value) == ("inference_eval.engine.memory_bytes_per_device", 16 * GIB)
    assert found.largest == 4 * GIB


def test_the_prediction_counts_on_the_same_memory(monkeypatch):
    monkeypatch.setattr(planner, "Engine", Sized)
    topology = SimpleNamespace(devices=jax.devices()[:1])
    assert predict_sampling(workload_of(), sampling(2 * GIB), topology).free == 2 * GIB
    assert predict_sampling(workload_of(), sampling(None), topology).free > 2 * GIB
    with pytest.raises(CapacityError, match="memory_bytes_per_device is .* Set it to at most"):
        predict_sampling(workload_of(), sampling(2**50), topology)


def test_every_turn_of_a_conversation_decodes_and_the_weights_are_moved_once():
    topology = SimpleNamespace(devices=jax.devices()[:1])
    once, often = (predict_sampling(workload_of(), conversations(turns), topology) for turns in (1.0, 2.5))
    assert often.sizes == once.sizes and often.estimate.step_s == once.estimate.step_s
    for before, after in zip([once, *once.considered], [often, *often.considered], strict=True):
        decoding = before.estimate.total_s - before.estimate.reshard_s
        assert after.estimate.total_s == pytest.approx(before.estimate.reshard_s + 2.5 * decoding) and decoding > 0


def conversations(turns):
    requests = longest_turns(SamplingParams(max_new_tokens=4), row_length=16, count=8)
    return SamplingWorkload(
        name="rollout", engine=EngineConfig(), engine_block="rollout", requests=requests, turns=turns
    )


def test_ctrl_c_ends_a_plan_whose_compiler_goes_on():
    compiled, timer = threading.Event(), threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), planner._threads() as submit:
        program = submit(compiled.wait)
        timer.start()
        program.result(60)
    assert exits.work_hangs()
    compiled.set()
    program.result(60)
    assert not exits.work_hangs()


def test_a_plan_waits_for_what_it_compiles_and_gives_nothing_up():
    with planner._threads() as submit:
        assert submit(divmod, 7, 2).result(60) == (3, 1)
    assert not exits.work_hangs()
