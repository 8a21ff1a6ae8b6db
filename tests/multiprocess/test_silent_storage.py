"""A bucket that stops answering while a run goes on: neither training nor its end waits, and reads have a deadline."""

import logging
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lockstep import storage
from lockstep.errors import PeerError
from lockstep.exits import FAULT
from lockstep.hosts.fault import failure_code
from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints import checkpointer
from lockstep.urls import url_to_fs
from tests import fake_gcs, tiny
from tests.clock import PATIENCE_S, until
from tests.multiprocess.harness import run_processes, run_unattended

pytestmark = pytest.mark.multiprocess

STEPS = 10


def train(hosts, name, at=None, victim=1) -> dict[str, Any]:
    """A run that saves every second step; ``at``: what happens after steps, each a path of the bucket or a signal of
    the process ``victim``."""
    from lockstep.training.checkpoints import grace

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
            ask_bucket(action)
        elif isinstance(action, int) and hosts.index == victim:
            os.kill(os.getpid(), action)

    trainer.add_hook(after_step)
    state = trainer.restore(tiny.init)
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


class RowsOfBucket:
    """Rows that are there, from the fourth step on, once an object of the bucket has been read."""

    def __init__(self, reads: bool) -> None:
        self._rows, self._reads = tiny.rows(), reads

    def batch(self, step, batch_size, rows):
        if self._reads and step >= 3:
            filesystem, path = url_to_fs("gs://bucket/rows")
            assert filesystem.cat_file(path) == b"rows"
        return self._rows.batch(step, batch_size, rows)


class SignalAtLine(logging.Handler):
    """Sends a process SIGTERM once this one says that it waits for storage."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for storage since" in record.getMessage() and "gs://bucket/rows" in record.getMessage():
            os.kill(self._process, signal.SIGTERM)
            logging.getLogger("lockstep.storage").removeHandler(self)


def ask_bucket(word):
    urllib.request.urlopen(f"{os.environ['STORAGE_EMULATOR_HOST']}/{word}").close()


def train_from_bucket(hosts, directory, readers, victim):
    """A run whose fourth step has no rows on the processes ``readers``; ``victim`` gets SIGTERM once 1 waits for it."""
    storage.LINE_S = 0.2
    leader = int(hosts.broadcast("process of the leader", b"%d" % os.getpid() if hosts.is_leader else None))
    settings = CheckpointerConfig(base_path=directory)
    trainer = tiny.make_trainer("host_local", STEPS, hosts, run_id="rows", checkpointer=settings)
    if hosts.is_leader:
        ask_bucket("stop")
    if hosts.index == 1:
        logging.getLogger("lockstep.storage").addHandler(SignalAtLine(os.getpid() if victim else leader))
    try:
        return trainer.train(tiny.init_model(trainer), RowsOfBucket(hosts.index in readers))
    finally:
        if hosts.is_leader:
            ask_bucket("go")


def restore(hosts, stops):
    """What becomes of a run that goes on from a checkpoint in a bucket, which stops answering as it is read."""
    read_arrays, limits = checkpointer.read_arrays, (storage.TRY_S, checkpointer.ANSWER_S, hosts.timeout_s)

    def read(*arguments):
        if hosts.is_leader and stops:
            ask_bucket("stop")
        return read_arrays(*arguments)

    checkpointer.read_arrays, storage.TRY_S, checkpointer.ANSWER_S, hosts.timeout_s = read, 0.5, 1.0, 15.0
    try:
        settings = CheckpointerConfig(base_path="gs://bucket/checkpoints")
        trainer = tiny.make_trainer("host_local", STEPS, hosts, run_id="kept", checkpointer=settings)
        return "read" if trainer.restore(tiny.init) is not None else "none"
    except PeerError as error:
        return [str(error), failure_code(error)]
    finally:
        checkpointer.read_arrays = read_arrays
        storage.TRY_S, checkpointer.ANSWER_S, hosts.timeout_s = limits
        if hosts.is_leader and stops:
            ask_bucket("go")


def body_reads(hosts, directory):
    result = train_from_bucket(hosts, directory, readers=(0, 1), victim=1)
    settings = CheckpointerConfig(base_path="gs://bucket/checkpoints")
    trainer = tiny.make_trainer("host_local", 2, hosts, run_id="kept", checkpointer=settings)
    trainer.train(tiny.init_model(trainer), tiny.rows())
    newest = (result.checkpoint or "").rpartition("/")[2]
    return [
        [result.completed_steps, result.stopped_by, newest],
        restore(hosts, stops=True),
        restore(hosts, stops=False),
    ]


@pytest.fixture
def bucket():
    with fake_gcs.serve() as bucket:
        bucket.objects["bucket/rows"] = b"rows"
        yield bucket


@pytest.mark.nightly  # in make slow: the save below
def test_sigterm_ends_a_run_that_waits_for_rows_and_a_restore_has_a_deadline(bucket, tmp_path):
    args = [str(tmp_path)]
    leader, other = run_processes(body_reads, devices=2, args=args, env=bucket.environment, timeout_s=300)
    assert leader == other
    (steps, stopped_by, newest), (text, code), read = leader
    assert (steps, stopped_by, newest) == (3, signal.SIGTERM, "step-3")
    assert code == FAULT and read == "read"
    assert "storage did not answer within 12 s: reading the checkpoint gs://bucket/checkpoints/kept/step-2" in text


ONE_WAITS = """
import sys
import lockstep
from lockstep.hosts import start
from tests.multiprocess.test_silent_storage import train_from_bucket

lockstep.run_main(lambda: train_from_bucket(start(), sys.argv[1], readers=(1,), victim=int(sys.argv[2])))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_ends_a_job_where_one_waits_for_rows_and_the_others_for_it(bucket, tmp_path, monkeypatch, victim):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    ends = run_unattended(
        ["python", "-c", ONE_WAITS, str(tmp_path), str(victim)], processes=2, devices=2, timeout_s=200
    )
    assert [end.code for end in ends] == [143, 143], [end.log for end in ends]
    assert "process 1 of 2 was asked to end (SIGTERM) in phase 'waiting for the rows of step" in ends[1].log
    assert "process 0 ends because process 1 was asked to end (SIGTERM)" in ends[0].log
    assert "nothing is saved, and the run goes on from its last checkpoint" in ends[1].log
    assert not list(tmp_path.rglob("step-*"))


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
