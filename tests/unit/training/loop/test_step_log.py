import io
import shlex
import subprocess
import sys
import types

import numpy as np
import pytest

from lockstep.models import LlamaConfig
from lockstep.placement import make_mesh
from lockstep.report import NoopTracker
from lockstep.terminal import Console
from lockstep.training.loop import step_log
from lockstep.training.loop.step_log import Meter, ProgressDisplay, Rate, Throughput, flops_per_token, peak_flops
from tests import tiny

CONFIG = LlamaConfig(
    hidden_dim=8, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, max_seq_len=64
)


def test_operations_per_token():
    projections = 8 * 16 + 2 * 8 * 8 + 16 * 8  # q, k and v, o
    weights = 2 * (projections + 3 * 8 * 32) + 8 * 100
    assert flops_per_token(CONFIG, 100, 10) == 6 * weights + 12 * 2 * 16 * 10


def test_frozen_weights_have_no_gradient():
    whole = flops_per_token(CONFIG, 100, 10)
    attention = 12 * 2 * 16 * 10
    assert flops_per_token(CONFIG, 100, 10, adapters=50) == (whole - attention) * 4 / 6 + 6 * 50 + attention


def test_a_cpu_has_no_peak_and_so_no_mfu():
    assert peak_flops(make_mesh()) == 0
    batch = {"tokens": np.zeros((4, 2, 8), np.int32)}
    found = Meter(make_mesh(), (tiny.CONFIG, tiny.numpy_weights())).step(batch, step_s=1.5, wait_s=0.5)
    assert found.tokens_per_s == 32.0 and found.mfu is None and "throughput/mfu" not in found.metrics()


def test_mfu_is_of_published_chips():
    device = types.SimpleNamespace(device_kind="TPU v5p", platform="tpu")
    mesh = types.SimpleNamespace(devices=np.array([device, device]))
    assert peak_flops(mesh) == 2 * 459e12
    batch = {"tokens": np.zeros((4, 8), np.int32)}
    found = Meter(mesh, (tiny.CONFIG, tiny.numpy_weights())).step(batch, step_s=1e-6, wait_s=1e-6)
    assert found.mfu == pytest.approx(32 * flops_per_token(tiny.CONFIG, 64, 8) / 2e-6 / 918e12)
    mesh.devices[1] = types.SimpleNamespace(device_kind="TPU v99", platform="tpu")
    assert peak_flops(mesh) == 0


def test_what_a_tracker_and_the_log_get():
    found = Throughput(rows=4, tokens=1000, step_s=1.5, wait_s=0.5, mfu=0.4512)
    assert found.metrics() == {
        "throughput/step_duration_s": 1.5,
        "throughput/examples_per_s": 2.0,  # with the wait, as the tokens
        "throughput/data_wait_s": 0.5,
        "throughput/tokens_per_s": 500.0,
        "throughput/mfu": 0.4512,
    }
    assert str(found) == "500 tokens/s  MFU 45.1%  data wait 25%"
    assert str(Throughput(rows=4, tokens=None, step_s=1.0, wait_s=0.0, mfu=None)) == "data wait 0%"


@pytest.fixture
def console(monkeypatch):
    console = Console(file=io.StringIO(), width=120)
    monkeypatch.setattr(step_log, "console", lambda: console)
    return console


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(step_log.time, "monotonic", lambda: now[0])
    return now


def lines(console):
    return console.file.getvalue().splitlines()


def test_only_the_leader_shows_anything(console):
    step_log.StepLog(5, NoopTracker(), is_leader=False).close()
    assert not lines(console)
    step_log.StepLog(5, NoopTracker(), is_leader=True).close()
    assert len(lines(console)) == 1


def test_a_terminal_gets_a_bar(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(step_log, "console", lambda: console)
    bar = ProgressDisplay(5)
    bar.update(3, 2.5)
    bar.close()
    assert "3/5" in console.file.getvalue() and "loss 2.5000" in console.file.getvalue()


def test_the_rate_is_that_of_the_last_steps(clock):
    rate, found = Rate(window=3), []
    for completed, now in ((0, 0.0), (1, 10.0), (2, 11.0), (3, 12.0)):
        clock[0] = now
        found.append(rate.add(completed))
    assert found == [0.0, 0.1, pytest.approx(2 / 11), 1.0], "the slow first step is out of the window"


def test_a_line_comes_every_so_many_seconds_and_the_last_state_once(console, clock):
    progress = ProgressDisplay(100, every_s=10.0)
    for second in range(12):
        clock[0] = float(second)
        progress.update(second, 2.0)
    progress.close()
    progress.close()
    assert [line.split()[1] for line in lines(console)] == ["0/100", "10/100", "11/100"]


def test_a_line_has_loss_speed_and_the_time_that_is_left(console, clock):
    progress = ProgressDisplay(7300, every_s=0.0)
    progress.update(0, float("nan"))
    clock[0] += 2.0
    progress.update(4, 1.25)
    clock[0] += 2.0
    progress.update(8, None, "reward 0.500 (last 10: 0.375)  " + "rollout 0.20 s  " * 8)
    assert lines(console) == [
        "step 0/7300  loss –  – steps/s  starting",
        "step 4/7300  loss 1.2500  2.00 steps/s  1:00:48 left",
        f"step 8/7300  2.00 steps/s  reward 0.500 (last 10: 0.375)  {'rollout 0.20 s  ' * 8}  1:00:46 left",
    ]


@pytest.mark.parametrize(("loss", "text"), [(-0.0, "loss 0.0000"), (0.0, "loss 0.0000"), (float("nan"), "loss –")])
def test_a_loss_of_zero_is_a_number(loss, text):
    assert step_log._line_of(loss, 0.0, "") == f"{text}  – steps/s"


SHOWING = """
from lockstep.training.loop.step_log import ProgressDisplay
display = ProgressDisplay(3, every_s=0.0)
for step in range(3):
    display.update(step + 1, 1.5)
display.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell", [pytest.param("PYTHONIOENCODING=latin-1 {}", marks=pytest.mark.nightly), "{} > /dev/full", "{} >&-"]
)
def test_a_stdout_that_takes_no_line_ends_no_training(shell):
    program = " ".join(map(shlex.quote, [sys.executable, "-c", SHOWING]))
    done = subprocess.run(["bash", "-c", shell.format(program)], capture_output=True)
    assert done.returncode == 0, done.stderr
