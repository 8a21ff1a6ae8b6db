"""What the processes run that save a checkpoint after every step while a report hangs, until SIGTERM comes."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.training import CheckpointerConfig
from tests import tiny
from tests.faults.bodies import GOOD, told

STEPS = 6
"""The step after which the leader gets SIGTERM; the round whose report hangs is before the first."""


def train(hosts, directory, *, hangs):
    """A run of some steps: its losses, the seconds of its steps and of its end, its checkpoints and what it said."""
    release, losses, times = threading.Event(), [], []

    def own(row, prompt):
        if hangs:
            release.wait(60)
        return 1.0

    def after(info):
        losses.append(float(info.loss).hex())
        times.append(time.monotonic())
        if info.next_step == STEPS and hosts.is_leader:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = CheckpointerConfig(every=1)
    trainer = tiny.make_trainer("auto", 50, hosts, checkpointer=settings, log_dir=directory, run_id=f"hangs-{hangs}")
    values = GOOD | {"eval_every": 100, "at_start": True, "at_end": False, "metrics": ["own_metrics:own"]}
    with mock.patch.dict(sys.modules, own_metrics=types.SimpleNamespace(own=own)):
        callback = SampleCallback(InferenceEvalConfig(**values), tiny.tokenizer(), hosts=hosts)
        trainer.add_hook(callback)
        trainer.add_hook(after)
        with told() as log, contextlib.redirect_stdout(io.StringIO()):
            result = trainer.train(tiny.init_model(trainer), tiny.rows())
            ended, said = time.monotonic(), log.getvalue()
        release.set()
        late = callback.flush(30)
    return {
        "losses": losses,
        "stopped_by": result.stopped_by,
        "steps_s": times[STEPS - 1] - times[0],
        "end_s": ended - times[STEPS - 1],
        "saved": sorted(path.parent.name for path in Path(trainer.checkpoints).glob("*/metadata.json")),
        "newest": Path(result.checkpoint).name,
        "errors": result.checkpoint_errors,
        "log": said,
        "late": late,
    }


def body_checkpoints(hosts, directory):
    return {name: train(hosts, directory, hangs=name == "hangs") for name in ("plain", "hangs")}
