"""What fails on the leader alone is reported, and training goes on bit for bit on every process."""

import contextlib
import io
import logging
import sys
import types

import jax.numpy as jnp
from harness import run_processes
from launches import record_launches

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.report.trackers import NoopTracker
from tests import tiny

STEPS, EVERY = 6, 2


class FailingTracker(NoopTracker):
    def log_rows(self, name, rows, *, step):
        raise ConnectionError("the tracker is down")


class LaunchingTracker(NoopTracker):
    """Does what Levanter's tracker does: asks JAX, which under a global mesh is a program on every device."""

    def log(self, metrics, *, step):
        jnp.zeros(()) + 1


def failing_metric(row, prompt):
    raise KeyError("no such score")


def launching_metric(row, prompt):
    return float(jnp.ones(()) * 2)


def train(hosts, prompts=("one",), tracker=None, metrics=(), on_error="skip", output_dir=None, sample=True):
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("lockstep").addHandler(handler)
    trainer = tiny.make_trainer("auto", STEPS, hosts)
    losses = []
    trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
    callback = None
    if sample:
        config = InferenceEvalConfig(
            eval_every=EVERY, prompts=prompts, max_new_tokens=4, metrics=list(metrics), on_error=on_error
        )
        callback = SampleCallback(config, tiny.tokenizer(), tracker=tracker, hosts=hosts, output_dir=output_dir)
        trainer.add_hook(callback)
    model = tiny.init_model(trainer)
    with record_launches() as launches, contextlib.redirect_stdout(io.StringIO()):
        trainer.train(model, tiny.rows())
    logging.getLogger("lockstep").removeHandler(handler)
    return {
        "losses": losses,
        "launches": launches,
        "log": log.getvalue(),
        "rounds": callback and callback.rounds,
        "skipped": callback and callback.skipped_rounds,
        "report_errors": callback and callback.report_errors,
        "ledger": callback and callback.engine and callback.engine.ledger.launches,
    }


def body(hosts):
    own = types.ModuleType("own_metrics")
    own.failing, own.launching = failing_metric, launching_metric
    sys.modules["own_metrics"] = own
    return {
        "plain": train(hosts, sample=False),
        "tracker fails": train(hosts, tracker=FailingTracker()),
        "tracker launches": train(hosts, tracker=LaunchingTracker()),
        "metric fails": train(hosts, metrics=["own_metrics:failing"]),
        "metric launches": train(hosts, metrics=["own_metrics:launching"]),
        "prompt file is missing": train(hosts, prompts="no/such/file.txt"),
        "samples cannot be written": train(hosts, output_dir="/dev/null/nowhere"),
    }


REPORTED = {
    "tracker fails": "the tracker is down",
    "tracker launches": "leader-only work",
    "metric fails": "no such score",
    "metric launches": "leader-only work",
    "prompt file is missing": "'no/such/file.txt' does not exist",
    "samples cannot be written": "write file",
}


def test_training_goes_on():
    leader, follower = run_processes(body, timeout_s=300)
    rounds = STEPS // EVERY
    for case, text in REPORTED.items():
        for result in (leader, follower):
            assert result[case]["losses"] == leader["plain"]["losses"], case
            assert len(result[case]["losses"]) == STEPS
        # No process launched what the other did not, although CPU would have let it pass.
        assert leader[case]["launches"] == follower[case]["launches"], case
        assert leader[case]["ledger"] == follower[case]["ledger"], case
        assert text in leader[case]["log"], (case, leader[case]["log"])
        skipped = rounds if case == "prompt file is missing" else 0
        for result in (leader, follower):
            assert (result[case]["rounds"], result[case]["skipped"]) == (rounds - skipped, skipped), case
        assert leader[case]["report_errors"] == (0 if skipped else rounds), case


def body_raise(hosts):
    try:
        train(hosts, prompts="no/such/file.txt", on_error="raise")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_on_error_raise_is_the_same_error_everywhere():
    texts = run_processes(body_raise, timeout_s=120)
    assert len(set(texts)) == 1
    assert texts[0].startswith("PeerError: 1 of 2 processes failed") and "no/such/file.txt" in texts[0]
