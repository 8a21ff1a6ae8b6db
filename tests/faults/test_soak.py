"""Many rounds in one training: nothing may grow."""

import contextlib
import gc
import io
import os
import threading

import jax
import pytest

from lockstep.callback import InferenceEvalConfig, SampleCallback
from tests import tiny
from tests.multiprocess.harness import run_processes

# In make slow: arrays in test_training_untouched.py, keys in test_endings.py.
pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

CYCLES, SETTLED, EVERY = 200, 50, 10


def resident_bytes():
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def lasting_threads():
    # A watchdog's thread ends when it was idle for two seconds: whether the two run at a look is chance, not growth.
    threads = [thread for thread in threading.enumerate() if "_end_if_failed" not in thread.name]
    watching = [thread for thread in threads if thread.name == "lockstep-watchdog"]
    assert len(watching) <= 2, threads  # the trainer's and the callback's
    return set(threads) - set(watching)


def body(hosts, cycles):
    """What this process holds, every few cycles."""
    trainer = tiny.make_trainer("auto", cycles, hosts)
    config = InferenceEvalConfig(eval_every=1, prompts=["one", "two"], max_new_tokens=8, on_error="raise")
    callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
    trainer.add_hook(callback)
    looks = []

    def look(info):
        hosts.barrier("look")
        callback.flush()
        gc.collect()
        looks.append(
            {
                "cycle": info.next_step,
                "bytes": resident_bytes(),
                "arrays": len(jax.live_arrays()),
                "fds": len(os.listdir("/proc/self/fd")),
                "threads": len(lasting_threads()),
                "keys": len(hosts.client.get_dir("lockstep")),
            }
        )
        hosts.barrier("looked")

    trainer.add_hook(look, every=EVERY)
    model = tiny.init_model(trainer)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(model, tiny.rows())
    return {"looks": looks, "rounds": callback.rounds}


def test_nothing_grows():
    for result in run_processes(body, processes=2, devices=2, timeout_s=540, args=(CYCLES,), own="memory is measured"):
        assert result["rounds"] == CYCLES
        looks = [look for look in result["looks"] if look["cycle"] >= SETTLED]
        first, last = looks[0], looks[-1]
        print(first, last)
        for what in ("arrays", "fds", "threads", "keys"):
            assert last[what] <= first[what], (what, looks)
        # What a leak of one round's K/V pool, of a program or of a prompt per cycle would make is far more.
        assert last["bytes"] - first["bytes"] < (CYCLES - SETTLED) * (54 << 10), looks
