"""SIGTERM where a save takes long: a bucket that takes so many bytes a second from each process, and no more."""

import collections
import os
import re
import signal
from typing import Any

import pytest

from tests import fake_gcs, tiny
from tests.multiprocess.harness import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]  # in make slow: unit/training/loop/test_stopping.py

STEPS = 5
BYTES_PER_S, TOO_SHORT_S, LONG_S = 4e5, 0.2, 600.0
"""What the bucket takes a second, seconds in which it takes no checkpoint, and seconds in which it takes several."""


def train(hosts, grace_s, signal_in=None) -> dict[str, Any]:
    """Losses by completed steps, and how it ended; ``signal_in``: the step in which process 1 gets SIGTERM."""
    from lockstep.training import CheckpointerConfig
    from lockstep.training.loop import stopping
    from lockstep.training.loop.batch_source import BatchFeed

    prepare, slow_step_s = BatchFeed.prepare, stopping.SLOW_STEP_S

    def with_a_signal(self, step):
        if step == signal_in and hosts.index == 1:  # its batch is made while the devices do the step before
            os.kill(os.getpid(), signal.SIGTERM)
        prepare(self, step)

    stopping.SLOW_STEP_S, BatchFeed.prepare = 0.0, with_a_signal
    try:
        settings = CheckpointerConfig(base_path="gs://bucket/checkpoints", every=2, grace_s=grace_s)
        trainer = tiny.make_trainer("host_local", STEPS, hosts, run_id=f"run-{grace_s:g}", checkpointer=settings)
        losses = {}
        trainer.add_hook(lambda info: losses.update({info.next_step: info.loss}))
        state = trainer.restore(tiny.init)
        result = trainer.train(tiny.init_model(trainer) if state is None else state, tiny.rows())
    finally:
        stopping.SLOW_STEP_S, BatchFeed.prepare = slow_step_s, prepare
    return {
        "losses": list(losses.items()),
        "stopped": [result.completed_steps, result.stopped_by],
        "checkpoint": result.checkpoint.rpartition("/")[2],
        "errors": result.checkpoint_errors,
    }


def body_runs(hosts):
    """A run without a break; for each time that SIGTERM leaves, one that it ends in its third step, while the
    checkpoint of the second is written, and one that goes on from there."""
    plain = train(hosts, 30.0)
    return [plain, *([train(hosts, grace_s, signal_in=3), train(hosts, grace_s)] for grace_s in (TOO_SHORT_S, LONG_S))]


@pytest.fixture(scope="module")
def runs():
    """The result of `body_runs`, and the bytes that each process wrote of a checkpoint."""
    with fake_gcs.serve() as bucket:
        bucket.bytes_per_s = BYTES_PER_S
        first, other = run_processes(body_runs, processes=2, devices=2, env=bucket.environment, timeout_s=300)
    assert first == other
    written = collections.Counter()
    for path, data in bucket.objects.items():
        if writer := re.search(rf"/run-30/step-{STEPS}/.*/ocdbt\.(process_\d+)/d/", path):
            written[writer[1]] += len(data)
    return first, written


def test_replicas_write_a_share_each(runs):
    _, written = runs
    assert len(written) == 2 and max(written.values()) < 1.1 * min(written.values())
    assert min(written.values()) > 2 * TOO_SHORT_S * BYTES_PER_S


@pytest.mark.parametrize(("run", "last"), [(1, 2), (2, 3)])
def test_a_slow_step_is_the_last_and_a_save_under_way_counts_where_no_other_fits(runs, run, last):
    results, _ = runs
    losses, (first, second) = dict(results[0]["losses"]), results[run]
    assert first["stopped"] == [3, signal.SIGTERM] and first["checkpoint"] == f"step-{last}" and not first["errors"]
    before, after = dict(first["losses"]), dict(second["losses"])
    assert sorted(before) == [1, 2] and sorted(after) == [3, 4, 5], "the hooks of the step that was not ended"
    assert before | after == losses
