"""What the processes of the fault suite run: one training in which a fault strikes after each step."""

import contextlib
import dataclasses
import io
import json
import logging
import os
import signal
import sys
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
from launches import record_launches

from lockstep import leader_only
from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.engine import engine as engine_module
from lockstep.report.background import BackgroundTracker
from lockstep.report.trackers import NoopTracker
from tests import tiny

environment_module = sys.modules["lockstep.hosts.environment"]
GOOD = {"eval_every": 1, "prompts": ["one"], "max_new_tokens": 4, "timeout_s": 60.0}


class Broken(NoopTracker):
    def log_rows(self, name, rows, *, step):
        raise ConnectionError("the tracker is down")


class Blocking(NoopTracker):
    def log_rows(self, name, rows, *, step):
        time.sleep(60)


def failing_metric(row, prompt):
    raise KeyError("no such score")


def launching_metric(row, prompt):
    return float(jnp.ones(()) * 2)


def _raise(*args, **kwargs):
    raise OSError("the tokenizer is broken")


def broken_tokenizer():
    tokenizer = tiny.tokenizer()
    tokenizer.__class__ = type("Broken", (type(tokenizer),), {"encode": _raise, "__call__": _raise})
    return tokenizer


def tokenizer_with_more(count):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<more {i}>" for i in range(count)])
    return tokenizer


class Faults:
    """For each fault a function that makes one round with it; they get the training step's info."""

    def __init__(self, hosts, directory):
        self.hosts, self.directory, self.callback = hosts, directory, None
        self.odd = hosts.index == hosts.count - 1

    def round(self, info, *, tokenizer=None, model=None, times=1, path=None, tracker=None, **values):
        config = InferenceEvalConfig(**GOOD | values)
        tokenizer = tokenizer or tiny.tokenizer()
        self.callback = SampleCallback(config, tokenizer, hosts=self.hosts, output_dir=path, tracker=tracker)
        for i in range(times):
            self.callback(tiny.Info(info.next_step + i, info.model if model is None else model))

    def leader_tokenizer_raises(self, info):
        self.round(info, tokenizer=broken_tokenizer() if self.hosts.is_leader else None)

    def prompt_file_missing_on_one_host(self, info):
        self.round(info, prompts="no/such/file.txt")

    def prompts_differ(self, info):
        self.round(info, prompts=["one"] if self.odd else ["two"])

    def configuration_differs(self, info):
        self.round(info, max_new_tokens=5 if self.odd else 4)

    def tokenizers_differ(self, info):
        self.round(info, tokenizer=tokenizer_with_more(1) if self.odd else None)

    def xla_flags_differ(self, info):
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true" * self.odd
        with mock.patch.dict(os.environ, XLA_FLAGS=flags):
            self.round(info)

    def jax_versions_differ(self, info):
        self._fixed(info, "jax version")

    def code_differs(self, info):
        self._fixed(info, "code of lockstep")

    def _fixed(self, info, name):
        fixed = environment_module._fixed()
        with mock.patch.object(environment_module, "_fixed", lambda: {**fixed, name: "other" if self.odd else "one"}):
            self.round(info)

    def a_host_is_late_but_in_time(self, info):
        time.sleep(1.0 * self.odd)
        self.round(info)

    def metric_raises(self, info):
        self.round(info, metrics=["own_metrics:failing"])

    def metric_launches(self, info):
        self.round(info, metrics=["own_metrics:launching"])

    def tracker_raises(self, info):
        self.round(info, tracker=Broken())

    def tracker_blocks(self, info):
        self.round(info, tracker=BackgroundTracker(Blocking(), leader_only, size=1), times=3)

    def disk_full(self, info):
        path = os.path.join(self.directory, "full")
        if self.hosts.is_leader:
            os.makedirs(path)
            os.symlink("/dev/full", os.path.join(path, "samples.jsonl"))
        self.round(info, path=path)

    def jsonl_torn(self, info):
        path = os.path.join(self.directory, "torn")
        if self.hosts.is_leader:
            os.makedirs(path)
            with open(os.path.join(path, "samples.jsonl"), "w") as file:
                file.write('{"step": 1}\n{"step": 2, "gen')
        self.round(info, path=path)
        if self.hosts.is_leader:
            with open(os.path.join(path, "samples.jsonl")) as file:
                assert [json.loads(line)["step"] for line in file] == [1, info.next_step]

    def out_of_pages(self, info):
        self.round(info, page_size=4, max_pages=2, max_new_tokens=40)

    def out_of_device_memory_on_one_host(self, info):
        measure = engine_module.free_bytes
        with mock.patch.object(engine_module, "free_bytes", lambda *a: 1000 if self.odd else measure(*a)):
            self.round(info)

    def nan_weights(self, info):
        self.round(info, model=jax.tree.map(lambda leaf: leaf * float("nan"), info.model))

    def token_ids_out_of_range(self, info):
        self.round(info, tokenizer=tokenizer_with_more(1000))

    def deleted_model(self, info):
        model = jax.tree.map(lambda leaf: leaf + 0, info.model)
        jax.tree.map(lambda leaf: leaf.delete(), model)
        self.round(info, model=model)

    def errors_in_a_row(self, info):
        self.round(info, prompts="no/such/file.txt", max_consecutive_errors=2, times=4)


GO_ON = [name for name in vars(Faults) if not name.startswith("_") and name != "round"]


def body_goes_on(hosts, directory, names):
    """One training with a fault after each step, and one without; what each fault did, and both runs' losses."""
    own = types.ModuleType("own_metrics")
    own.failing, own.launching = failing_metric, launching_metric
    sys.modules["own_metrics"] = own
    faults, found = Faults(hosts, directory), {}
    steps = len(names) + 1

    def strike(info):
        if info.next_step > len(names):
            return
        name = names[info.next_step - 1]
        log = io.StringIO()
        handler = logging.StreamHandler(log)
        logging.getLogger("lockstep").addHandler(handler)
        begin, error = time.monotonic(), None
        with record_launches() as launches, contextlib.redirect_stdout(io.StringIO()):
            try:
                getattr(faults, name)(info)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        logging.getLogger("lockstep").removeHandler(handler)
        one = faults.callback
        found[name] = {
            "seconds": time.monotonic() - begin,
            "error": error,
            "log": log.getvalue(),
            "launches": launches,
            "rounds": one.rounds,
            "skipped": one.skipped_rounds,
            "report_errors": one.report_errors,
            "off": one.switched_off,
        }
        hosts.barrier(f"after {name}")

    losses = {}
    for kind in ("plain", "faulty"):
        trainer = tiny.make_trainer("auto", steps, hosts)
        seen = losses[kind] = []
        trainer.add_hook(lambda info, seen=seen: seen.append(float(info.loss).hex()))
        if kind == "faulty":
            trainer.add_hook(strike)
        trainer.train(tiny.init_model(trainer), tiny.rows())
    return {"losses": losses, "found": found}


class Killing(NoopTracker):
    def log_rows(self, name, rows, *, step):
        os.kill(os.getpid(), signal.SIGTERM)


def body_sigterm(hosts):
    """A signal on one host in each phase: when training ended, and what became of the round."""
    results = {}
    for phase in ("reading_prompts", "generating", "reporting"):
        tokenizer, tracker = tiny.tokenizer(), None
        odd = hosts.index == hosts.count - 1
        trainer = tiny.make_trainer("auto", 50, hosts)
        if phase == "reporting" and hosts.is_leader:
            tracker = Killing()
        config = InferenceEvalConfig(**GOOD | {"eval_every": 2, "max_new_tokens": 24})
        callback = SampleCallback(config, tokenizer, hosts=hosts, tracker=tracker)
        trainer.add_hook(callback)
        kill_at = {"reading_prompts": "waiting for all hosts to begin", "generating": "prefill"}.get(phase)
        say, log = hosts._channel.heart.enter, io.StringIO()

        def enter(name, say=say, kill_at=kill_at, odd=odd):
            # Between launches the leader does not wait for the others: only its own signal is seen at once for sure.
            if name == kill_at and (odd if name != "prefill" else hosts.is_leader):
                os.kill(os.getpid(), signal.SIGTERM)
            say(name)

        handler = logging.StreamHandler(log)
        logging.getLogger("lockstep").addHandler(handler)
        before, begin = hosts.ledger.count, time.monotonic()
        model = tiny.init_model(trainer)
        with mock.patch.object(hosts._channel.heart, "enter", enter), contextlib.redirect_stdout(io.StringIO()):
            result = trainer.train(model, tiny.rows())
        logging.getLogger("lockstep").removeHandler(handler)
        results[phase] = {
            "steps": result.completed_steps,
            "stopped_by": result.stopped_by,
            "rounds": callback.rounds,
            "abandoned": callback.abandoned_rounds,
            "launches": hosts.ledger.launches[before:],
            "log": log.getvalue(),
            "seconds": time.monotonic() - begin,
        }
        hosts.barrier(f"after {phase}")
    return results


def body_exits(hosts):
    """Errors that end a run, caught here, with the text that every process would have ended with."""
    from launches import assert_same_launches

    from lockstep.main.run import settled
    from lockstep.report.trackers import WandbTrackerConfig

    texts = {}

    def caught(name, function):
        try:
            function()
        except BaseException as error:
            texts[name] = f"{type(error).__name__}: {error}"

    def without_wandb():
        with mock.patch.dict(sys.modules, wandb=None), settled(hosts, "tracker"):
            if hosts.is_leader:
                WandbTrackerConfig().build("unused", "unused")

    def one_host_launches():
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        with assert_same_launches(hosts), jax.set_mesh(mesh):
            if hosts.is_leader:
                jnp.zeros(())  # gloo lets this pass

    def one_host_launches_ours():
        trainer = tiny.make_trainer("auto", 1, hosts)
        if hosts.is_leader:
            hosts.ledger.record("decode", "0" * 64)
        trainer.train(tiny.init_model(trainer), tiny.rows())

    caught("wandb_is_missing", without_wandb)
    caught("eager", one_host_launches)
    caught("ledger", one_host_launches_ours)
    return texts


def body_ends(hosts, how):
    """Ends the process: too late, stalled, or killed."""
    odd = hosts.index == hosts.count - 1
    trainer = tiny.make_trainer("auto", 50, hosts)
    config = InferenceEvalConfig(**GOOD | {"eval_every": 1, "max_new_tokens": 40, "timeout_s": 2.0})
    callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
    generous = dataclasses.replace(config, timeout_s=60.0)
    callback.config = generous  # the first round compiles
    say, rounds = hosts._channel.heart.enter, [0]

    def enter(name):
        if name == "waiting for all hosts to begin":
            rounds[0] += 1
            callback.config = config
            if how == "late" and odd and rounds[0] == 2:
                time.sleep(20)
        say(name)
        if name == "decode" and odd and rounds[0] == 2:
            if how == "stall":
                say("stalling")
                time.sleep(60)
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_hook(callback)
    model = tiny.init_model(trainer)
    with mock.patch.object(hosts._channel.heart, "enter", enter), contextlib.redirect_stdout(io.StringIO()):
        trainer.train(model, tiny.rows())
