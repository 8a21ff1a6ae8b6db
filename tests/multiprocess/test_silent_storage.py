"""A bucket that stops answering while a run goes on: neither training nor its end waits."""

import logging
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests import fake_gcs, tiny
from tests.clock import PATIENCE_S, until
from tests.multiprocess.harness import run_processes
from tests.multiprocess.test_resume import init

pytestmark = pytest.mark.multiprocess

STEPS = 10


def train(hosts, name, at=None, victim=1) -> dict[str, Any]:
    """A run that saves every second step; ``at``: what happens after steps, each a path of the bucket or a signal of
    the process ``victim``."""
    from lockstep.training import CheckpointerConfig
    from lockstep.training.checkpoints import checkpointer, grace

    checkpointer.LATE_S, grace.ANSWER_S = PATIENCE_S, 0.5
    lines = []
    logger = logging.getLogger("lockstep.training.checkpoints.checkpointer")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    settings = CheckpointerConfig(base_path="gs://bucket/checkpoints", every=2, grace_s=1.0)
    trainer = tiny.make_trainer("host_local", STEPS, hosts, run_id=name, checkpointer=settings)
    losses = {}

    def after_step(info):
        losses[info.next_step] = info.loss
        action = (at or {}).get(info.next_step)
        if action == "stop":  # the bucket has the checkpoint of step 2
            until(lambda: not hosts.is_leader or trainer._checkpointer.pending.ended.is_set())
            checkpointer.LATE_S = 0.5
        if isinstance(action, str) and hosts.is_leader:
            urllib.request.urlopen(f"{os.environ['STORAGE_EMULATOR_HOST']}/{action}").close()
        elif isinstance(action, int) and hosts.index == victim:
            os.kill(os.getpid(), action)

    trainer.add_hook(after_step)
    state = trainer.restore(init)
    result = trainer.train(tiny.init_model(trainer) if state is None else state, tiny.rows())
    logger.removeHandler(handler)
    return {
        "losses": list(losses.items()),
        "end": [result.completed_steps, result.stopped_by, (result.checkpoint or "").rpartition("/")[2]],
        "errors": result.checkpoint_errors,
        "lines": lines,
    }


def body(hosts):
    plain = train(hosts, "plain")
    late = train(hosts, "late", {3: "stop", 9: "go"})
    return [plain, late, train(hosts, "ended", {3: "stop", 5: int(signal.SIGTERM)})]


SCRIPT = """
import signal
import lockstep
from lockstep.hosts import start
from tests.multiprocess.test_silent_storage import train

def main():
    hosts = start()
    return 128 + train(hosts, "alone", {3: "stop", 5: int(signal.SIGTERM)}, victim=0)["end"][1]

lockstep.run_main(main)
"""


@pytest.mark.slow
def test_a_process_whose_save_hangs_ends_after_sigterm():
    """Python would wait for the threads of the save at its exit."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed (pip install 'jax-lockstep[gcs]')")
    with fake_gcs.serve() as bucket:
        environment = {
            **os.environ,
            **bucket.environment,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "JAX_PLATFORMS": "cpu",
        }
        words = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "gs://bucket/checkpoints/alone does not answer, and the 1 s" in done.stderr


@pytest.mark.nightly
def test_training_goes_on_without_the_save_that_is_late_and_sigterm_ends_it(tmp_path):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed (pip install 'jax-lockstep[gcs]')")
    with fake_gcs.serve() as bucket:
        leader, other = run_processes(body, processes=2, devices=2, env=bucket.environment, timeout_s=300)
    plain, late, ended = leader
    for mine, theirs in zip(leader, other, strict=True):
        assert all(mine[key] == theirs[key] for key in ("losses", "end", "errors"))
    assert plain["end"] == [STEPS, None, "step-10"] and not plain["errors"]
    assert late["losses"] == plain["losses"] and late["end"] == plain["end"] and late["errors"] == 0
    left_out = [line for line in late["lines"] if line.startswith("training goes on without another checkpoint")]
    assert len(left_out) == 2, "those of steps 6 and 8; that of 4 is complete once the bucket answers"
    assert "the checkpoint of step 4, written since" in left_out[0]
    assert "to gs://bucket/checkpoints/late/step-4, is not complete after" in left_out[0]
    assert ended["end"] == [6, signal.SIGTERM, "step-2"] and ended["errors"] == 1
    assert any("gs://bucket/checkpoints/ended does not answer, and the 1 s" in line for line in ended["lines"])
