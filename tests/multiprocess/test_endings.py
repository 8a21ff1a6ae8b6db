"""Stop strings, budget, cancel and audit on two processes: the same on both, and training bit for bit untouched."""

import dataclasses
import re

import pytest

import lockstep
from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.engine import Engine, EngineConfig, Gate, Session
from lockstep.errors import PeerError
from lockstep.placement import make_mesh
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches
from tests.rollouts import Recorder
from tests.unit.engine.models import Between

STEPS, EVERY = 6, 3
STOPS = ["e", "a "]
SHORT_THEN_LONG = ["one", "What is 12 plus 7?", "two", "What is 40 plus 41?"]
OPTIONS = {
    "stop strings": {"stop": STOPS, "audit": True},
    "budget": {"max_seconds": 1e-9, "audit": True, "stop": STOPS},
    "drawn": {"prompts": SHORT_THEN_LONG, "prompts_per_round": 2},
}


def train(hosts, options):
    trainer = tiny.make_trainer("auto", STEPS, hosts)
    losses, tracker, callback = [], Recorder("inference_eval/samples"), None
    trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
    if options is not None:
        config = InferenceEvalConfig(
            eval_every=EVERY,
            max_new_tokens=24,
            temperature=0.8,
            n_generations=4,
            page_size=8,
            max_seqs=4,
            on_error="raise",
            **{"prompts": ["What is 12 plus 7?", "one"], **options},
        )
        callback = SampleCallback(config, tiny.tokenizer(), tracker=tracker, hosts=hosts)
        trainer.add_hook(callback)
    model = tiny.init_model(trainer)
    before = hosts.ledger.count
    with record_launches() as launches:
        trainer.train(model, tiny.rows())
    return {
        "losses": losses,
        "launches": launches,
        "train_step_traces": trainer.train_step_traces,
        "rows": [row.to_dict() for row in tracker.rows],
        "scalars": list(tracker.scalars.values()),
        "ledger": str(hosts.ledger),
        "launched": hosts.ledger.launches[before:],
        "compiled": [each.name for each in callback.engine.compilations] if callback else [],
        "report_errors": callback and callback.report_errors,
        "key_count": len(hosts.client.get_dir("lockstep/job/inference_eval")),
    }


def body_callback(hosts):
    return {name: train(hosts, options) for name, options in {"plain": None, **OPTIONS}.items()}


def body_engine(hosts):
    mesh = make_mesh("auto")
    model = (tiny.CONFIG, tiny.placed_weights(mesh))
    requests = tiny.requests(temperature=0.8, n_generations=2)
    engine = Engine(EngineConfig(page_size=8, max_seqs=4, max_steps_per_launch=5, layout={"tensor": 1}), mesh)
    plain = engine.generate(model, requests, hosts=hosts)

    def cancel(scheduler):
        if (1, 1) in scheduler.unfinished() and scheduler.tokens_so_far(1, 1):
            scheduler.cancel(1, 1)
        if (5, 0) in scheduler.unfinished():
            scheduler.cancel(5, 0)

    cancelled = engine.generate(model, requests, hosts=hosts, observer=Between(cancel))
    with hosts.scope("own budget") as scope:
        # The follower's clock says that the time was over long ago; the leader's decides.
        ticks = iter(range(1000)) if hosts.is_leader else iter(range(0, 10**6, 1000))
        gate = Gate(scope, 6, clock=lambda: float(next(ticks)))
        late = Session(engine).generate(scope, model, requests, gate=gate).completions
        scope.barrier("end")

    def fail(scheduler):
        if hosts.index == 1 and any(scheduler.counts.tokens):
            raise ValueError("no such view")

    try:
        engine.generate(model, requests, hosts=hosts, observer=Between(fail))
        failed = ""
    except PeerError as error:
        failed = str(error)
    again = engine.generate(model, requests, hosts=hosts)
    gap = lockstep.audit(model, requests, plain, hosts=hosts).logprob_gap
    wrong = [dataclasses.replace(c, logprobs=(*c.logprobs[:-1], c.logprobs[-1] + 0.01)) for c in plain]
    return {
        "plain": [dataclasses.asdict(c) for c in plain],
        "cancelled": [dataclasses.asdict(c) for c in cancelled],
        "late": [dataclasses.asdict(c) for c in late],
        "failed": failed,
        "again": again == plain,
        "gap": gap,
        "wrong gap": lockstep.audit(model, requests, wrong, hosts=hosts).logprob_gap,
        "ledger": str(engine.ledger),
    }


def body(hosts):
    return {"callback": body_callback(hosts), "engine": body_engine(hosts)}


@pytest.fixture(scope="module")
def results():
    return run_processes(body, timeout_s=300)


@pytest.mark.slow
def test_in_the_callback(results):
    leader, follower = (result["callback"] for result in results)
    for name in ("plain", *OPTIONS):
        for result in (leader, follower):
            assert result[name]["losses"] == leader["plain"]["losses"], name
            assert result[name]["train_step_traces"] == 1
        assert leader[name]["launches"] == follower[name]["launches"], name
        assert leader[name]["ledger"] == follower[name]["ledger"], name
        assert not leader[name]["report_errors"] and follower[name]["rows"] == []

    rows = leader["stop strings"]["rows"]
    assert len(rows) == 2 * 4 * STEPS // EVERY
    for row in rows:
        assert not any(stop in row["generated_text"] for stop in STOPS)
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert stopped and all(row["num_tokens"] < 24 or row in stopped for row in rows)
    for scalars in leader["stop strings"]["scalars"]:
        assert 0 < scalars["inference_eval/logprob_gap"] <= 1e-5
        assert scalars["inference_eval/time/audit_s"] > 0
    assert "audit" in leader["stop strings"]["launched"]

    for row in leader["budget"]["rows"]:
        assert (row["generated_text"], row["num_tokens"], row["mean_logprob"]) == ("", 0, 0.0)
        assert row["finish_reason"] == "budget"
    assert [s["inference_eval/unfinished_completions"] for s in leader["budget"]["scalars"]] == [8] * (STEPS // EVERY)
    assert "decode" not in leader["budget"]["launched"]

    # Two rounds deal all four prompts; programs are made once.
    first, second = ({r["prompt_id"] for r in leader["drawn"]["rows"] if r["step"] == step} for step in (3, 6))
    assert (first, second) == ({0, 2}, {1, 3}), "the short ones first, so that the long ones could need more"
    for result in (leader, follower):
        assert sorted(result["drawn"]["compiled"]) == ["copy_pages", "decode", "new_cache", "prefill", "reshard"]


@pytest.mark.slow
def test_in_the_engine(results):
    leader, follower = (result["engine"] for result in results)
    assert leader == follower
    assert leader["gap"] <= 1e-5
    assert abs(leader["wrong gap"] - 0.01) <= 1e-5
    text = r"1 of 2 processes failed at 'generate#\d+/between launches'. process 1: ValueError: no such view"
    assert re.fullmatch(text, leader["failed"]) and leader["again"]
    plain = leader["plain"]
    for name, reason in (("cancelled", "cancelled"), ("late", "budget")):
        ended = [c for c in leader[name] if c["finish_reason"] == reason]
        assert 0 < len(ended) < len(plain), name
        for before, after in zip(plain, leader[name], strict=True):
            if after in ended:
                assert before["tokens"][: len(after["tokens"])] == after["tokens"]
            else:
                assert before == after
