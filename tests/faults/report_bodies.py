"""What the processes run whose report of a round is slow or hangs, under a trainer that waits 4 s for anything."""

import contextlib
import copy
import io
import socket
import sys
import threading
import time
import types
from unittest import mock

from lockstep.callback import InferenceEvalConfig, SampleCallback, reporter
from lockstep.report.trackers import NoopTracker
from tests import tiny
from tests.faults.bodies import GOOD, told

TIMEOUT_S = 4.0
"""The trainer's; a round's metrics take longer."""
PER_ROW_S, PROMPTS = 1.5, ["one", "two", "three"]
STEPS, EVERY = 3, 2
"""One round, and a step after it."""


class Recorder(NoopTracker):
    def __init__(self):
        self.rows = []

    def log_rows(self, name, rows, *, step):
        self.rows += [(row.step, row.prompt_id, row.metrics["own"]) for row in rows]


class Hanging(Recorder):
    def __init__(self, release):
        super().__init__()
        self._release = release

    def log_rows(self, name, rows, *, step):
        self._release.wait(60)
        super().log_rows(name, rows, step=step)


class Cases:
    """For each fault what is in a run's way; ``release`` ends it, so that no thread outlives the body."""

    def __init__(self):
        self.release = threading.Event()
        self.recorder = Recorder()

    @contextlib.contextmanager
    def _metric(self, function):
        with mock.patch.dict(sys.modules, own_metrics=types.SimpleNamespace(own=function)):
            yield self.recorder

    def none(self):
        return self._metric(lambda row, prompt: 1.0)

    def metric_is_slow(self):
        return self._metric(lambda row, prompt: time.sleep(PER_ROW_S) or 1.0)

    def metric_never_returns(self):
        return self._metric(lambda row, prompt: float(self.release.wait(60)))

    @contextlib.contextmanager
    def judge_does_not_answer(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()

            def ask(row, prompt):
                with contextlib.suppress(ConnectionError):  # the end of the fault
                    with socket.create_connection(address) as judge:
                        judge.sendall(row.generated_text.encode())
                        judge.recv(1)
                return 1.0

            with self._metric(ask):
                yield self.recorder

    @contextlib.contextmanager
    def file_system_hangs(self):
        append = reporter.append_jsonl

        def hang(*arguments):
            self.release.wait(60)
            append(*arguments)

        with self.none(), mock.patch.object(reporter, "append_jsonl", hang):
            yield self.recorder

    @contextlib.contextmanager
    def tracker_blocks(self):
        self.recorder = Hanging(self.release)
        with self.none():
            yield self.recorder


def train(hosts, directory, name, engines):
    """A run with a fault in its reports: losses, how long it took and what it said; then the fault is over.

    Args:
        engines: The engine of the run before, whose programs are compiled; then the one of this run.
    """
    impatient = copy.copy(hosts)
    impatient.timeout_s = TIMEOUT_S
    trainer, losses, case = tiny.make_trainer("auto", STEPS, impatient), [], Cases()
    trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
    with getattr(case, name)() as tracker:
        values = GOOD | {"eval_every": EVERY, "at_end": False, "prompts": PROMPTS, "metrics": ["own_metrics:own"]}
        # Only the slow one can be done in any time.
        config = InferenceEvalConfig(**values, flush_s=30 if name == "metric_is_slow" else 1)
        path = f"{directory}/{name}"
        callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts, tracker=tracker, output_dir=path)
        callback._session.engine = engines.pop() if engines else None
        trainer.add_hook(callback)
        model, begin = tiny.init_model(trainer), time.monotonic()
        with told() as log, contextlib.redirect_stdout(io.StringIO()):
            trainer.train(model, tiny.rows())
            seconds, said = time.monotonic() - begin, log.getvalue()
            case.release.set()
    found = {"losses": losses, "seconds": seconds, "log": said, "rounds": callback.rounds}
    engines.append(callback.engine)
    late = callback.flush(30)
    return found | {"late": late, "rows": tracker.rows, "errors": callback.report_errors}


def body_reports(hosts, directory, names):
    engines = []
    return {name: train(hosts, directory, name, engines) for name in ("none", *names)}
