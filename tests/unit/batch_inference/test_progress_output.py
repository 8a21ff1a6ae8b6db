"""The progress of a job on the leader."""

import contextlib
import dataclasses
import io

import pytest

from lockstep.batch_inference import progress_output
from lockstep.batch_inference.job_progress import HostProgress, JobProgress
from lockstep.batch_inference.progress_output import ProgressOutput, line
from lockstep.report import NoopTracker
from lockstep.terminal import Console
from tests.unit.batch_inference.made_up_progress import JOB


class Seen(NoopTracker):
    """A tracker."""

    def __init__(self):
        self.steps = []

    def log(self, values, step):
        self.steps.append(step)


def job(seconds):
    return JobProgress(rows=100, found=int(seconds), hosts=[HostProgress()], seconds=seconds)


@pytest.mark.parametrize("defer", [False, True])
def test_the_log_and_the_tracker_have_what_comes_every_ten_seconds_and_the_last(defer, capsys):
    seen = Seen()
    with contextlib.closing(ProgressOutput("sample", seen, defer=defer)) as show:
        for seconds in (0.0, 4.0, 11.0, 12.0):
            show(job(seconds))
        assert seen.steps == ([] if defer else [0, 11])
        assert capsys.readouterr().out == f"{line(job(0))}\n{line(job(11))}\n"
    assert seen.steps == [0, 11, 12] and capsys.readouterr().out == f"{line(job(12))}\n"
    show.close()
    assert seen.steps == [0, 11, 12] and not capsys.readouterr().out, "nothing is said twice"


def test_where_the_job_fails_the_log_has_the_last_line_and_the_tracker_nothing_more(capsys):
    seen = Seen()
    with pytest.raises(OSError), contextlib.closing(ProgressOutput("sample", seen, defer=True)) as show:
        show(job(0.0))
        show(job(4.0))
        raise OSError
    assert not seen.steps and capsys.readouterr().out == f"{line(job(0))}\n{line(job(4))}\n"


def test_a_terminal_has_a_bar_under_the_title_and_the_same_line(monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=200, color_system=None)
    monkeypatch.setattr(progress_output, "console", lambda: terminal)
    with contextlib.closing(ProgressOutput("sample: 600 prompts [bold]", Seen(), defer=True)) as show:
        show(JOB)
        show(dataclasses.replace(JOB, found=1200 - 500))
    title, bar, text = screen.getvalue().splitlines()[-4:-1]
    assert "sample: 600 prompts [bold]" in title and bar.count("━") == 200
    assert text.strip().endswith("1,200 of 1,200 completions, 5,000 tokens/s (3,000 + 2,000), 0.42 of the bandwidth "
                                 "floor, 900 of 2,048 pages in use, 0:00 left")  # fmt: skip


def test_the_line_says_all_of_it():
    assert line(JOB) == (
        "sample: 340 of 600 prompts, 700 of 1,200 completions, 5,000 tokens/s (3,000 + 2,000), "
        "0.42 of the bandwidth floor, 900 of 2,048 pages in use, 0:25 left"
    )


def test_another_host_than_the_leader_shows_nothing(capsys):
    seen = Seen()
    ProgressOutput(None, seen, defer=False).close()
    assert not seen.steps and not capsys.readouterr().out
