"""A signal is noted and reaches all hosts; a second one ends the process."""

import contextlib
import math
import os
import signal
import threading

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError, DivergenceError, HostError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.training import CheckpointerConfig, OptimizerConfig, Trainer, TrainerConfig, lm_loss
from lockstep.training.checkpoints import checkpointer as checkpointer_module
from lockstep.training.checkpoints.checkpoint import CheckpointDirectory
from lockstep.training.loop import stopping as stopping_module
from lockstep.training.loop.batch_source import BatchFeed
from lockstep.training.loop.stopping import SKIPS_IN_A_ROW, LossSpikeConfig, LossWatch, StopRequest, TrainResult
from lockstep.training.step.train_step import ALARM_FLAG, SAVE_FLAG, SIGNAL_FLAG, SKIPPED, SLOW_FLAG, StepMetrics
from tests.clock import until
from tests.multiprocess.harness import run_threads
from tests.unit.training import bigrams
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import init, make_trainer, rows


@pytest.fixture
def hosts():
    return Hosts(MemoryClient.hub(1)[0])


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(stopping_module.os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_ends_nothing(hosts, ended, number):
    with StopRequest(hosts) as request:
        assert request.signal is None
        os.kill(os.getpid(), number)
        assert request.signal == hosts.preemption.signal == number
    assert ended == []


def test_one_ctrl_c_that_is_delivered_twice_is_one_request(hosts, ended):
    with StopRequest(hosts):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == []


def test_a_second_request_ends_the_process_at_once(hosts, ended, monkeypatch):
    monkeypatch.setattr(stopping_module, "AGAIN_AFTER_S", 0.0)
    with StopRequest(hosts):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, 0),
        ({"diverged": True}, 1),
        ({"alarmed": True}, 1),
        ({"stopped_by": 15}, 143),
        ({"stopped_by": 2, "diverged": True, "alarmed": True}, 130),
    ],
)
def test_a_launcher_sees_by_the_exit_code_what_ended_a_run(values, code):
    result = TrainResult(
        **{"model": None, "completed_steps": 3, "loss": 0.0, "stopped_by": None, "tracker_errors": 0} | values
    )
    assert result.exit_code == code and result.complete == (code == 0)


def test_afterwards_signals_do_what_they_did_and_the_request_is_forgotten(hosts):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(hosts) as request:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before and request.signal is None


def test_in_another_thread_it_changes_no_handler(hosts):
    before, found = signal.getsignal(signal.SIGINT), []

    def body():
        with StopRequest(hosts):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_signal_that_is_ignored_ends_no_run(monkeypatch):
    """SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(Hosts(MemoryClient.hub(1)[0])) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def metrics(**values):
    return StepMetrics(**({"loss": 0.0, "stop": 0, "save": False, "slow": False, "values": {}} | values))


def test_after_a_slow_step_all_hosts_hear_of_a_signal_that_came_to_one():
    def body(hosts):
        stop = StopRequest(hosts)
        found = [stop.after_step(metrics(slow=True), 3.0)]
        if hosts.index == 1:
            hosts.preemption.note(signal.SIGTERM)
        return [*found, stop.after_step(metrics(slow=True), 3.0)]

    assert run_threads(body, 2) == [[None, signal.SIGTERM]] * 2


@pytest.mark.parametrize("reason", ["-128", "0", "9", "127", "1" * 400, "nan", "\x1b[2J", ""])
def test_no_other_process_chooses_the_exit_code(reason):
    """A forged signal -128 ended a job with exit code 0 after one of 4,000 steps."""

    def body(hosts):
        if hosts.index == 1:
            with pytest.raises(HostError, match="after SIGINT, SIGTERM, SIGHUP alone"):
                StopRequest(hosts).after_step(metrics(slow=True), 0.1)
        else:
            hosts.reasons_to_stop("end of a slow step", None, reason)

    run_threads(body, 2)


@pytest.mark.parametrize("number", [-128, 9, "2", 1.5, [2]])
def test_no_other_process_ends_a_run_by_another_signal(number):
    def body(hosts):
        if hosts.index == 1:
            with pytest.raises(HostError):
                StopRequest(hosts).between_steps()
            return
        with contextlib.suppress(HostError), hosts.run_on_all("end of the run") as ended:
            ended.share(number)

    run_threads(body, 2)
    if isinstance(number, int):
        with StopRequest(Hosts(MemoryClient.hub(1)[0])) as request, pytest.raises(HostError, match="SIGHUP alone"):
            request.after_step(metrics(stop=number), 0.1)


def test_after_a_fast_step_nobody_is_asked():
    """The other host of the two never answers."""
    hosts = Hosts(MemoryClient.hub(2)[0], timeout_s=0.01)
    hosts.preemption.note(signal.SIGTERM)
    assert StopRequest(hosts).after_step(metrics(), 0.1) is None
    assert StopRequest(hosts).after_step(metrics(stop=signal.SIGINT, slow=True), 3.0) == signal.SIGINT


def test_the_leader_says_whether_steps_are_slow_and_a_signal_is_the_largest_flag():
    leader, other = (StopRequest(Hosts(client)) for client in MemoryClient.hub(2))
    assert [leader.flag(SAVE_FLAG), other.flag(0)] == [SAVE_FLAG + SLOW_FLAG, 0], "nothing is measured yet"
    leader.after_step(metrics(), stopping_module.SLOW_STEP_S)
    assert leader.flag(SAVE_FLAG) == SAVE_FLAG
    leader.after_step(metrics(), stopping_module.SLOW_STEP_S + 1)
    assert leader.flag(0) == SLOW_FLAG
    other._preemption.note(signal.SIGINT)
    assert leader.flag(SAVE_FLAG, "loop in 3 of 4 answers") == SAVE_FLAG + SLOW_FLAG + ALARM_FLAG
    assert other.flag(0, "loop in 3 of 4 answers") == SIGNAL_FLAG * signal.SIGINT > SAVE_FLAG + SLOW_FLAG + ALARM_FLAG


@pytest.mark.parametrize(("slow_step_s", "steps"), [(0.0, 2), (600.0, 3)])
def test_a_signal_during_a_step_ends_the_run_after_it_where_steps_are_slow(monkeypatch, slow_step_s, steps):
    prepare = BatchFeed.prepare

    def with_a_signal(self, step):
        if step == 2:  # while the devices do the second step
            os.kill(os.getpid(), signal.SIGTERM)
        prepare(self, step)

    monkeypatch.setattr(stopping_module, "SLOW_STEP_S", slow_step_s)
    monkeypatch.setattr(BatchFeed, "prepare", with_a_signal)
    trainer = make_trainer()
    result = trainer.train(init(trainer), rows())
    assert (result.stopped_by, result.completed_steps) == (signal.SIGTERM, steps)


STEPS = 5


class Poisoned:
    """Rows of which at some steps the last has a loss that is multiplied by a number, maybe nan; they take no rows."""

    def __init__(self, factors):
        self.factors = factors

    def batch(self, step, batch_size, part):
        taken = step - sum(bad < step for bad in self.factors)
        factor = np.ones(batch_size, np.float32)
        factor[-1] = self.factors.get(step, 1.0)
        return rows().batch(taken, batch_size, part) | {"factor": factor[part]}


def loss(model, batch):
    parts = lm_loss(model, {name: batch[name] for name in ("tokens", "loss_mask")})
    return parts._replace(total=parts.total * jnp.mean(batch["factor"]))


def run(factors, *, steps=STEPS, restore=False, **values):
    config = TrainerConfig(num_train_steps=steps, train_batch_size=8, **values)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0, lr_schedule="constant")
    trainer = Trainer(config, optimizer.build(steps), loss, schedule=optimizer.schedule(steps))
    found = []
    trainer.add_hook(lambda info: found.append(info.loss))
    state = trainer.restore(Bigrams.init) if restore else None
    result = trainer.train(trainer.init_model(Bigrams.init) if state is None else state, Poisoned(factors))
    assert trainer.train_step_traces == 1
    return found, result, trainer


def leaves(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.model)]


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))


def two_programs(test):
    """A test of two programs that have the same bits as users compile them, and not by the emitters of `make test`."""
    return pytest.mark.slow(pytest.mark.optimized(test))


@pytest.fixture(scope="module")
def plain():
    return run({})


@pytest.fixture(scope="module")
def skipped():
    return run({2: math.nan}, steps=STEPS + 1, on_nan="skip")


@two_programs
def test_skipping_costs_nothing_where_no_step_is_bad(monkeypatch):
    monkeypatch.setattr(bigrams, "EMBED", hax.Axis("embed", 1024))  # a state beside which scratch is small
    plain, skipping = run({}), run({}, on_nan="skip")
    assert skipping[0] == plain[0] and same(skipping[1], plain[1]) and skipping[1].skipped_steps == 0
    ((before,), (after,)) = (trainer._step._programs.values() for _, _, trainer in (plain, skipping))
    before, after = before.memory(), after.memory()
    # The state is donated to the new one all the same, and no second one is made beside it.
    assert after.alias_size_in_bytes == before.alias_size_in_bytes > 0
    assert after.temp_size_in_bytes <= before.temp_size_in_bytes + before.alias_size_in_bytes // 2


@two_programs
def test_a_skipped_step_is_as_if_its_batch_had_not_been_there(plain, skipped, caplog):
    found, result, _ = skipped
    assert math.isnan(found[2]) and [*found[:2], *found[3:]] == plain[0]
    assert same(result, plain[1])
    assert (result.completed_steps, result.skipped_steps, result.diverged) == (STEPS + 1, 1, False)


@two_programs
def test_stopping_leaves_the_model_as_it_was_before_the_bad_step():
    found, result, _ = run({2: math.inf}, on_nan="stop")
    assert (result.completed_steps, result.diverged, result.stopped_by) == (3, True, None)
    assert len(found) == 2, "no hook sees the bad step"
    assert same(result, run({}, steps=2)[1])


def test_raising_names_the_step_and_what_to_do():
    with pytest.raises(DivergenceError, match=r"step 3 has loss nan and gradient norm nan\. Lower optimizer\.learn"):
        run({2: math.nan})


@pytest.mark.parametrize("waits", [True, False])
def test_raising_does_not_lose_the_checkpoint_that_is_being_written(tmp_path, monkeypatch, caplog, waits):
    write = checkpointer_module.write_arrays

    def slow(directory, arrays):
        wait = write(directory, arrays)
        return lambda: (until(lambda: "ends once the checkpoint of step 2 is written" in caplog.text), wait())

    monkeypatch.setattr(checkpointer_module, "write_arrays", slow)
    if not waits:
        monkeypatch.setattr(checkpointer_module.Checkpointer, "_outcome", lambda *_: 1 / 0)
    with pytest.raises(DivergenceError, match="step 3 has loss nan"):
        run({2: math.nan}, checkpointer=CheckpointerConfig(every=2), log_dir=str(tmp_path), run_id="run")
    assert not waits or CheckpointDirectory(str(tmp_path / "run" / "checkpoints")).steps() == [2]
    assert ("step 2 may not be complete: checkpoint end" in caplog.text) != waits


def test_a_spike_is_skipped_and_a_run_that_goes_on_knows_the_losses_before_it(tmp_path, plain):
    values = {
        "on_nan": "skip",
        "loss_spike": LossSpikeConfig(rolling_interval_length=3, sigma_factor=6.0),
        "checkpointer": CheckpointerConfig(every=2),
        "log_dir": str(tmp_path),
        "run_id": "run",
    }
    whole, result, _ = run({4: 800.0}, steps=6, **values | {"run_id": "whole"})
    assert whole[4] > 50 * whole[3] and result.skipped_steps == 1
    assert [*whole[:4], whole[5]] == plain[0]
    first, _, _ = run({4: 800.0}, steps=4, **values)
    second, resumed, _ = run({4: 800.0}, steps=6, restore=True, **values)
    assert [*first, *second] == whole and resumed.skipped_steps == 1


def figures(loss, skipped=None, grad_norm=1.0):
    values = {"grad_norm": grad_norm} | ({} if skipped is None else {SKIPPED: skipped})
    return StepMetrics(loss=loss, stop=0, save=False, slow=False, values=values)


def test_the_limit_follows_the_last_good_losses():
    watch = LossWatch("skip", LossSpikeConfig(rolling_interval_length=2, sigma_factor=2.0))
    limits = []
    for value, bad in ((1.0, 0.0), (3.0, 0.0), (9.0, 1.0), (5.0, 0.0)):
        assert watch.judge(1, figures(value, bad), is_leader=False) is False
        limits.append(watch.limit)
    assert limits == [math.inf, 2 + 2 * 1.0, 4.0, 4 + 2 * 1.0]
    assert watch.skipped == 1
    watch.reset()
    assert (watch.limit, watch.skipped) == (math.inf, 0)


def test_a_spike_ends_a_run_that_raises_and_the_message_has_the_limit():
    watch = LossWatch("raise", LossSpikeConfig(rolling_interval_length=2, sigma_factor=1.0))
    for value in (1.0, 3.0):
        watch.judge(1, figures(value), is_leader=False)
    with pytest.raises(DivergenceError, match=r"step 3 has loss 4 .* the limit of a loss is 3 \(trainer\.loss_spike\)"):
        watch.judge(3, figures(4.0), is_leader=False)
    with pytest.raises(DivergenceError, match="gradient norm inf"):
        LossWatch("raise", None).judge(3, figures(4.0, grad_norm=math.inf), is_leader=False)


def test_skipping_for_ever_ends(caplog):
    watch = LossWatch("skip", None)
    for step in range(SKIPS_IN_A_ROW):
        watch.judge(step, figures(math.nan, 1.0), is_leader=True)
    assert "training goes on (50 skipped so far)" in caplog.text
    with pytest.raises(DivergenceError, match="the 50 steps before it were bad too"):
        watch.judge(51, figures(math.nan, 1.0), is_leader=True)


def test_values_out_of_range():
    with pytest.raises(ConfigError, match="rolling_interval_length is 1; it must be at least 2"):
        LossSpikeConfig(rolling_interval_length=1)
    with pytest.raises(ConfigError, match="sigma_factor is 0.0; it must be more than 0"):
        LossSpikeConfig(sigma_factor=0.0)
