"""What the processes of the fault suite run: one training in which a fault strikes after each step."""

import contextlib
import copy
import dataclasses
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from lockstep.callback import InferenceEvalConfig, SampleCallback, reporter
from lockstep.engine import engine as engine_module
from lockstep.engine import launches as launches_module
from lockstep.engine.schedule import Scheduler
from lockstep.hosts import Ledger
from lockstep.report import answers, jsonl
from lockstep.report.trackers import NoopTracker
from lockstep.text import StopFinder, token_count
from lockstep.training import OptimizerConfig, TrainConfig, TrainerConfig, lm_loss, train
from tests import tiny
from tests.multiprocess.launches import record_launches

environment_module = sys.modules["lockstep.hosts.config"]
audit_module = sys.modules["lockstep.engine.audit"]
GOOD = {"prompt_format": "text", "eval_every": 1, "prompts": ["one"], "max_new_tokens": 4, "timeout_s": 60.0}


class Broken(NoopTracker):
    def log_rows(self, name, rows, *, step):
        raise ConnectionError("the tracker is down")


class Launching(NoopTracker):
    """Does what Levanter's tracker does: asks JAX, which under a global mesh is a program on every device."""

    def log(self, metrics, *, step):
        jnp.zeros(()) + 1


class BlockingForSteps(NoopTracker):
    def __init__(self):
        self.released = threading.Event()

    def log(self, metrics, *, step):
        self.released.wait(60)


def failing_metric(row, prompt):
    raise KeyError("no such score")


def launching_metric(row, prompt):
    return float(jnp.ones(()) * 2)


def _raise(*args, **kwargs):
    raise OSError("the tokenizer is broken")


def broken_tokenizer():
    tokenizer = tiny.tokenizer()
    # Its name stays the same: hosts compare it.
    own = type(tokenizer)
    tokenizer.__class__ = type(own.__name__, (own,), {"encode": _raise, "__call__": _raise})
    return tokenizer


def tokenizer_with_more(count):
    tokenizer = tiny.tokenizer()
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    first = max(tokenizer.get_vocab().values()) + 1
    parts["model"]["vocab"] |= {f"more{i}": first + i for i in range(count)}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(parts))
    return tokenizer


@contextlib.contextmanager
def told():
    """What the library logs inside."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("lockstep").addHandler(handler)
    try:
        yield log
    finally:
        logging.getLogger("lockstep").removeHandler(handler)


class Faults:
    """For each fault a function that makes one round with it; they get the training step's info.

    Rounds with the same caps have one engine, as the rounds of one callback have: it must be as good after a fault.
    """

    def __init__(self, hosts, directory):
        self.hosts, self.directory, self.callback = hosts, directory, None
        self.odd = hosts.index == hosts.count - 1
        self.engines = {}

    def round(self, info, *, tokenizer=None, model=None, times=1, path=None, tracker=None, **values):
        config = InferenceEvalConfig(**GOOD | values)
        tokenizer = tokenizer or tiny.tokenizer()
        self.callback = SampleCallback(config, tokenizer, hosts=self.hosts, output_dir=path, tracker=tracker)
        kept = config.engine_config(None), token_count(tokenizer)
        self.callback._session.engine = self.engines.get(kept)
        for i in range(times):
            self.callback(tiny.Info(info.next_step + i, info.model if model is None else model))
        self.callback.flush()
        self.engines[kept] = self.callback.engine

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
        fixed = environment_module._versions_and_source()
        with mock.patch.object(
            environment_module, "_versions_and_source", lambda: {**fixed, name: "other" if self.odd else "one"}
        ):
            self.round(info)

    def a_host_is_late_but_in_time(self, info):
        time.sleep(1.0 * self.odd)
        self.round(info)

    def metric_raises(self, info):
        self.round(info, metrics=["own_metrics:failing"])

    def metric_backtracks(self, info):
        """With ``re`` the leader would be silent until its peers end the job: this text takes it longer than a life."""
        text = "a" * 80 + "b"
        with (
            mock.patch.object(reporter.AnswerDecoder, "__call__", lambda *a: (text, "")),
            mock.patch.object(answers, "MATCH_S", 0.2),
        ):
            self.round(info, metrics=["regex=(a|aa)+$"])

    def metric_launches(self, info):
        self.round(info, metrics=["own_metrics:launching"])

    def tracker_launches(self, info):
        self.round(info, tracker=Launching())

    def tracker_raises(self, info):
        self.round(info, tracker=Broken())

    def disk_full(self, info):
        def open_full(path, flags):
            return os.open("/dev/full", flags & ~os.O_CREAT)

        with mock.patch.object(jsonl, "in_place", open_full):
            self.round(info, path=os.path.join(self.directory, "full"))

    def jsonl_torn(self, info):
        path = os.path.join(self.directory, "torn")
        if self.hosts.is_leader:
            os.makedirs(path)
            with open(os.path.join(path, "samples.jsonl"), "w", encoding="utf-8") as file:
                file.write('{"step": 1}\n{"step": 2, "gen')
        self.round(info, path=path)
        if self.hosts.is_leader:
            with open(os.path.join(path, "samples.jsonl"), encoding="utf-8") as file:
                assert [json.loads(line)["step"] for line in file] == [1, info.next_step]

    def out_of_pages(self, info):
        self.round(info, page_size=4, max_pages=2, max_new_tokens=40)

    def out_of_device_memory_on_one_host(self, info):
        measure = engine_module.free_bytes
        with mock.patch.object(engine_module, "free_bytes", lambda *a: 1000 if self.odd else measure(*a)):
            self.round(info)

    def stop_finder_raises_on_one_host(self, info):
        with self.raising(StopFinder, "__call__", "no text"):
            self.round(info, stop=["zz"])

    def commit_raises_on_one_host(self, info):
        with self.raising(Scheduler, "commit", "no room for results"):
            self.round(info)

    def prefill_cannot_be_placed_on_one_host(self, info):
        with self.raising(launches_module, "place_argument", "no room for a batch"):
            self.round(info)

    def audit_cannot_be_placed_on_one_host(self, info):
        with self.raising(audit_module, "place", "no room for a batch"):
            self.round(info, audit=True)

    @contextlib.contextmanager
    def raising(self, owner, name, text):
        """Makes a function raise on one host."""
        error = MemoryError(text) if self.odd else None
        with mock.patch.object(owner, name, side_effect=error, autospec=True) if error else contextlib.nullcontext():
            yield

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


def body_goes_on(hosts, directory, names):
    """One training with a fault after each step, and one without; what each fault did, and both runs' losses."""
    own = types.ModuleType("own_metrics")
    own.failing, own.launching = failing_metric, launching_metric
    faults, found = Faults(hosts, directory), {}
    steps = len(names) + 1

    def strike(info):
        if info.next_step > len(names):
            return
        name = names[info.next_step - 1]
        begin, error = time.monotonic(), None
        with (
            told() as log,
            mock.patch.dict(sys.modules, own_metrics=own),
            record_launches() as launches,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                getattr(faults, name)(info)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
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
    def __init__(self):
        self.struck = []

    def log_rows(self, name, rows, *, step):
        self.struck.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)


class Data:
    """The ``data`` block of a command: random rows."""

    CROSS_ENTROPY = True
    validation_urls = ()

    def load(self, tokenizer, model_max_seq_len, seed, hosts=None, vocab_size=None):
        return tiny.rows()

    def load_validation(self, tokenizer, model_max_seq_len, hosts=None, vocab_size=None):
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomRowsConfig(TrainConfig):
    data: None = None
    source = Data()
    loss_fn = staticmethod(lm_loss)


def train_and_save(hosts, directory, steps, **settings):
    """The whole command after its command line: exit code."""
    config = RandomRowsConfig(
        trainer=TrainerConfig(num_train_steps=steps, train_batch_size=8, log_dir=directory, run_id=f"run-{steps}"),
        model=tiny.CONFIG,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=0, lr_schedule="constant"),
        tokenizer=tiny.TOKENIZER,
        hf_save_path="hf",
        **settings,
    )
    return train(config, hosts)


@contextlib.contextmanager
def sigterm_at(hosts, phase, here):
    """A signal as this process first says that it enters a phase, where ``here``; gives a list of the time of it."""
    say, struck = hosts._channel.heartbeat.enter, []

    def enter(name):
        if name == phase and here and not struck:
            struck.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        say(name)

    with mock.patch.object(hosts._channel.heartbeat, "enter", enter):
        yield struck


def body_saved_on_sigterm(hosts, directory):
    """Three commands: a signal while a round reads prompts, after step 2; none in 3 steps; one in the save after 3."""
    samples = InferenceEvalConfig(**GOOD | {"eval_every": 2})
    with sigterm_at(hosts, "read prompts", hosts.is_leader):
        codes = [train_and_save(hosts, directory, 50, inference_eval=samples)]
    codes.append(train_and_save(hosts, directory, 3))
    with sigterm_at(hosts, "saving", hosts.index == hosts.count - 1) as struck, told() as log:
        codes.append(train_and_save(hosts, os.path.join(directory, "signalled"), 3))
    return codes, {"struck": struck, "ended": time.monotonic(), "log": log.getvalue()}


SIGNALS = {
    "compiling_the_train_step": "compiling train_step",
    "reading_prompts": "waiting for all hosts to begin",
    "preparing": "prepare",
    "generating": "prefill",
    "decoding": "decode",
    "auditing": "audit",
    "reporting": None,
}
"""The phase at whose beginning a process gets the signal; None: from its tracker."""


def body_sigterm(hosts, directory):
    """A signal on one host in each phase: when training ended, and what became of the round; then, what is saved.

    Rounds have the engine of those before, as those of one callback: it must be as good after a signal.
    """
    results, engine = {}, None
    for phase, kill_at in SIGNALS.items():
        tokenizer, tracker = tiny.tokenizer(), None
        odd = hosts.index == hosts.count - 1
        trainer = tiny.make_trainer("auto", 50, hosts)
        if phase == "reporting" and hosts.is_leader:
            tracker = Killing()
        config = InferenceEvalConfig(**GOOD | {"eval_every": 2, "max_new_tokens": 24, "audit": phase == "auditing"})
        callback = SampleCallback(config, tokenizer, hosts=hosts, tracker=tracker)
        callback._session.engine = engine
        trainer.add_hook(callback)
        if phase == "reporting":
            trainer.add_hook(lambda info, callback=callback: callback.flush())  # the signal comes before the next step
        # Between launches the leader does not wait for the others: only its own signal is seen at once for sure.
        here = hosts.is_leader if kill_at in ("prefill", "decode") else odd
        before = hosts.ledger.count
        model = tiny.init_model(trainer)
        with sigterm_at(hosts, kill_at, here) as struck, told() as log, contextlib.redirect_stdout(io.StringIO()):
            result = trainer.train(model, tiny.rows())
        results[phase] = {
            "steps": result.completed_steps,
            "stopped_by": result.stopped_by,
            "rounds": callback.rounds,
            "abandoned": callback.abandoned_rounds,
            "launches": hosts.ledger.launches[before:],
            "log": log.getvalue(),
            "struck": struck if tracker is None else tracker.struck,
            "ended": time.monotonic(),
        }
        engine = callback.engine
        hosts.barrier(f"after {phase}")
    codes, results["saving"] = body_saved_on_sigterm(hosts, directory)
    return {"phases": results, "codes": codes}


def in_a_thread(array):
    """What a launch from a second thread raises; empty where it passes."""
    raised = []

    def launch():
        try:
            jax.block_until_ready(array + 1)
        except Exception as error:
            raised.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    return "".join(raised)


def body_threads(hosts):
    """Launches from a second thread: in a train step's hook, in a round outside training, and after both."""
    seen = {}
    trainer = tiny.make_trainer("auto", 1, hosts)

    def in_training(info):
        seen["training"] = in_a_thread(jax.tree.leaves(info.model)[0])

    trainer.add_hook(in_training)
    model = trainer.train(tiny.init_model(trainer), tiny.rows()).model
    array = jax.tree.leaves(model)[0]
    say = hosts._channel.heartbeat.enter

    def enter(name):
        say(name)
        if name == "decode":
            seen["round"] = in_a_thread(array)

    callback = SampleCallback(InferenceEvalConfig(**GOOD, on_error="raise"), tiny.tokenizer(), hosts=hosts)
    with mock.patch.object(hosts._channel.heartbeat, "enter", enter), contextlib.redirect_stdout(io.StringIO()):
        callback(tiny.Info(1, model))
    seen["after"] = in_a_thread(array)
    return seen | {"rounds": callback.rounds}


def body_tracker_blocks(hosts):
    """The same training without a tracker, and with one that never returns: losses, seconds and what was told."""
    found = {}
    with told() as log:
        for name, tracker in {"plain": None, "blocked": BlockingForSteps()}.items():
            impatient = copy.copy(hosts)
            trainer, losses = tiny.make_trainer("auto", 3, impatient, tracker=tracker), []
            trainer.add_hook(lambda info, losses=losses: losses.append(float(info.loss).hex()))
            # The end of training waits half of this for the tracker; before, however long a host takes to compile.
            trainer.add_hook(lambda info, own=impatient: vars(own).update(timeout_s=4.0))
            model, begin = tiny.init_model(trainer), time.monotonic()
            try:
                trainer.train(model, tiny.rows())
            finally:
                seconds = time.monotonic() - begin
                if tracker is not None:  # a failure must not leave its thread to the next test
                    tracker.released.set()
            found[name] = {"losses": losses, "seconds": seconds}
    return found | {"log": log.getvalue()}


class Caught:
    """Errors that end a run, caught here, with the text that every process would have ended with."""

    def __init__(self):
        self.texts, self.seconds = {}, {}

    def __call__(self, name, function):
        begin = time.monotonic()
        try:
            function()
        except BaseException as error:
            self.texts[name] = f"{type(error).__name__}: {error}"
        self.seconds[name] = time.monotonic() - begin


def body_exits(hosts):
    from lockstep.report.trackers import WandbTrackerConfig

    caught, threads = Caught(), body_threads(hosts)
    blocked = body_tracker_blocks(hosts)

    def round_fails():
        config = InferenceEvalConfig(**GOOD | {"prompts": "no/such/file.txt", "on_error": "raise"})
        trainer = tiny.make_trainer("auto", 1, hosts)
        trainer.add_hook(SampleCallback(config, tiny.tokenizer(), hosts=hosts))
        trainer.train(tiny.init_model(trainer), tiny.rows())

    def without_wandb():
        with mock.patch.dict(sys.modules, wandb=None), hosts.run_on_all("tracker"):
            if hosts.is_leader:
                WandbTrackerConfig().build("unused", "unused")

    caught("wandb_is_missing", without_wandb)
    caught("round", round_fails)
    return {**vars(caught), "threads": threads, "blocked": blocked}


def body_launch_of_one_host(hosts):
    from tests.multiprocess.launches import assert_same_launches

    caught = Caught()

    def one_host_launches():
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        with assert_same_launches(hosts), jax.set_mesh(mesh):
            if hosts.is_leader:
                jnp.zeros(())  # gloo lets this pass

    def one_host_launches_ours():
        odd = copy.copy(hosts)
        odd.ledger = Ledger()
        trainer = tiny.make_trainer("auto", 1, odd)
        if hosts.is_leader:
            odd.ledger.record("decode", "0" * 64)
        trainer.train(tiny.init_model(trainer), tiny.rows())

    caught("eager", one_host_launches)
    trainer = tiny.make_trainer("auto", 1, hosts)
    trainer.train(tiny.init_model(trainer), tiny.rows())  # compiles the step: the time is that of the fault alone
    caught("ledger", one_host_launches_ours)
    return vars(caught)


def body_ends(hosts, how, victim=-1):
    """Ends the process ``victim``: too late, stalled, or killed before, during or after generation."""
    odd = hosts.index == victim % hosts.count
    trainer = tiny.make_trainer("auto", 50, hosts)
    config = InferenceEvalConfig(**GOOD | {"eval_every": 1, "max_new_tokens": 40, "timeout_s": 2.0})
    callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
    generous = dataclasses.replace(config, timeout_s=60.0)
    callback.config = generous  # the first round compiles
    say, rounds = hosts._channel.heartbeat.enter, [0]

    def enter(name):
        if name == "waiting for all hosts to begin":
            rounds[0] += 1
            callback.config = config
            if how == "late" and odd and rounds[0] == 2:
                print(f"struck at {time.monotonic()}", file=sys.stderr, flush=True)
                time.sleep(20)
            if how == "die before" and odd and rounds[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        say(name)
        if name == "decode" and odd and rounds[0] == 2:
            if how == "stall":
                say("stalling")
                print(f"struck at {time.monotonic()}", file=sys.stderr, flush=True)
                time.sleep(60)
            if how == "die during":
                os.kill(os.getpid(), signal.SIGKILL)

    def after(info):
        if how == "die after" and odd and info.next_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_hook(callback)
    trainer.add_hook(after)
    model = tiny.init_model(trainer)
    with mock.patch.object(hosts._channel.heartbeat, "enter", enter), contextlib.redirect_stdout(io.StringIO()):
        trainer.train(model, tiny.rows())
