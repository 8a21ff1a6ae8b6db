"""How far a run is, at a terminal and in a log."""

import io

import pytest
import rich
from rich.console import Console

from lockstep.training.loop import progress_bar
from lockstep.training.loop.progress_bar import BarProgress, LineProgress, NoProgress, Rate, make_progress


@pytest.fixture
def console(monkeypatch):
    console = Console(file=io.StringIO(), width=120)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    return console


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    return now


def lines(console):
    return console.file.getvalue().splitlines()


def test_only_the_leader_shows_anything():
    assert isinstance(make_progress(5, is_leader=False), NoProgress)


def test_a_log_gets_lines_and_a_terminal_a_bar(console, monkeypatch):
    assert isinstance(make_progress(5, is_leader=True), LineProgress)
    monkeypatch.setattr(rich, "get_console", lambda: Console(file=io.StringIO(), force_terminal=True))
    bar = make_progress(5, is_leader=True)
    bar.close()
    assert isinstance(bar, BarProgress)


def test_the_rate_is_that_of_the_last_steps(clock):
    rate, found = Rate(window=3), []
    for completed, now in ((0, 0.0), (1, 10.0), (2, 11.0), (3, 12.0)):
        clock[0] = now
        found.append(rate.add(completed))
    assert found == [0.0, 0.1, pytest.approx(2 / 11), 1.0], "the slow first step is out of the window"


def test_a_line_comes_every_so_many_seconds_and_the_last_state_once(console, clock):
    progress = LineProgress(100, every_s=10.0)
    for second in range(12):
        clock[0] = float(second)
        progress.update(second, 2.0)
    progress.close()
    progress.close()
    assert [line.split()[1] for line in lines(console)] == ["0/100", "10/100", "11/100"]


def test_a_line_has_loss_speed_and_the_time_that_is_left(console, clock):
    progress = LineProgress(7300, every_s=0.0)
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
