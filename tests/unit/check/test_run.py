"""A run that is compared while it goes on, and what is shown of it."""

import io
import json

import pytest
from rich.console import Console

from lockstep.check.compare import End
from lockstep.check.findings import Finding, Frame, Place
from lockstep.check.run import CheckResult, Follower, print_at_once, print_report, render_page, write_page
from tests.unit.check.test_log import LAUNCH, PROGRAM, STACK

LOG = {**PROGRAM, "id": 1, "name": "log", "digest": "e"}
WHERE = {"is": "where", "thread": "MainThread", "stack": 0, "compiling": False, "waiting": False}
LOGGED = {**LAUNCH, "program": 1}


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


class Job:
    """Two processes that write what the test says, and who follows them."""

    def __init__(self, directory, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("lockstep.check.run.time.monotonic", lambda: self.now)
        self.told = []
        self.follower = Follower(directory, 2, lambda finding: self.told.append(finding.kind))
        self._directory = directory
        for index in (0, 1):
            self.write(index, STACK, PROGRAM, LOG)

    def write(self, index, *lines):
        with (self._directory / f"process-{index}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def pass_seconds(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            self.follower.read()


def test_a_difference_is_told_while_the_run_goes_on_and_once(job):
    for _ in range(200):
        job.write(0, LAUNCH, LOGGED)
        job.write(1, LAUNCH)
        job.follower.read()
    assert job.told == ["one_process"]
    (finding,) = job.follower.finish(End.DONE)
    assert finding.count == 200


def test_a_difference_in_a_run_that_stands_still_is_told_after_seconds(job):
    job.write(0, LAUNCH, LOGGED, LAUNCH)
    job.write(1, LAUNCH, LAUNCH)
    job.follower.read()
    assert job.told == []
    job.pass_seconds(10)
    assert job.told == ["one_process"]


def test_one_that_is_slower_is_no_difference(job):
    job.write(0, *[LAUNCH] * 10)
    job.write(1, LAUNCH)
    job.pass_seconds(10)
    assert job.told == []
    job.write(1, *[LAUNCH] * 9)
    assert job.follower.finish(End.DONE) == []


def test_a_process_that_is_far_ahead_is_not_read_until_the_other_follows(job, monkeypatch):
    monkeypatch.setattr("lockstep.check.run.AHEAD", 10)
    monkeypatch.setattr("lockstep.check.log.CHUNK", 128)
    job.write(0, *[LAUNCH] * 500)
    job.follower.read()
    assert job.follower.logs[0].launches < 20
    job.write(1, *[LAUNCH] * 500)
    assert job.follower.finish(End.DONE) == []
    assert [log.launches for log in job.follower.logs] == [500, 500]


def test_launches_of_other_threads_have_no_order(job):
    job.write(0, LAUNCH, {**LOGGED, "thread": "loader"}, LAUNCH)
    job.write(1, LAUNCH, LAUNCH)
    assert [finding.kind for finding in job.follower.finish(End.DONE)] == ["thread"]


def test_a_loop_in_a_thread_is_compared_where_the_main_one_trains_nothing(job):
    job.write(0, *[{**each, "thread": "trainer"} for each in (LAUNCH, LOGGED, LAUNCH)])
    job.write(1, *[{**LAUNCH, "thread": "trainer"}] * 2)
    assert [finding.kind for finding in job.follower.finish(End.DONE)] == ["one_process"]


def test_processes_wait_unless_one_compiles(job):
    job.write(0, LAUNCH)
    job.write(1, STACK)
    job.follower.read()
    assert job.follower.waits()
    job.write(1, {**WHERE, "compiling": True})
    job.follower.read()
    assert not job.follower.waits()


def test_processes_that_wait_in_a_launch_of_all_are_ended_and_none_is_said_not_to_enter_it(job):
    """XLA's CPU runtime has stopped; one process has handed it more launches than the other."""
    job.write(0, LAUNCH, LAUNCH, LAUNCH, {**WHERE, "waiting": True})
    job.write(1, LAUNCH, WHERE)
    job.follower.read()
    assert [finding.kind for finding in job.follower.finish(End.HUNG)] == ["some_enter"]
    job.write(1, {**WHERE, "waiting": True})
    job.follower.read()
    assert job.follower.waits()


def test_a_launch_that_is_missing_is_not_the_one_in_which_both_wait(job):
    job.write(0, LAUNCH, LAUNCH, LAUNCH, {**WHERE, "waiting": True})
    job.write(1, LAUNCH, {**WHERE, "waiting": True})
    assert job.follower.finish(End.HUNG) == []


def test_an_error_of_a_launch_that_timed_out_is_no_launch_that_is_missing(job):
    job.write(0, LAUNCH, LAUNCH)
    job.write(1, LAUNCH, {"is": "error", "text": "JaxRuntimeError: Gloo AllReduce failed", "stack": 0})
    assert job.follower.finish(End.HUNG) == []


EVIL = "<script>alert(1)</script> [bold]"


def result(*findings, code=0, end=End.DONE):
    fields = {"launches": (12, 12), "other_threads": 0, "errors": {}, "seconds": 1.5}
    return CheckResult(command=("python", "train.py"), code=code, end=end, findings=findings, **fields)


@pytest.fixture
def finding():
    own = Frame(file="train.py", line=7, function="main", text=f"log({EVIL!r})", own=True)
    library = Frame(file="/site-packages/tracker.py", line=3, function="log", text="", own=False)
    places = (
        Place(process=0, text="launches zeros", stack=(library, own)),
        Place(process=1, text="launches nothing more"),
    )
    return Finding(kind="one_process", text=EVIL, places=places, count=3, details=("a set",))


def printed(result):
    file = io.StringIO()
    print_report(result, Console(file=file, width=60, highlight=False))
    return file.getvalue()


def test_nothing_found_is_one_line_and_exit_code_0():
    assert printed(result()).strip() == "✓ nothing found (launches by process: 12, 12; 1.5 s)"
    assert result().exit_code == 0


def test_a_finding_has_the_users_own_line_the_stack_and_the_way_out(finding):
    text = printed(result(finding))
    assert "process 0 launches zeros at train.py:7" in text and "tracker.py:3 in log" in text
    assert "process 1 launches nothing more\n" in text
    assert "3 times" in text and "| a set" in text and EVIL in text
    assert f"On a pod: {finding.about.on_pod}" in text and f"Change: {finding.about.fix}" in text
    assert result(finding).exit_code == 1
    assert "docs/" not in text  # an installed user has no clone


def test_what_is_seen_during_the_run_is_one_line_with_both_places(finding):
    file = io.StringIO()
    print_at_once(finding, Console(file=file, width=60, highlight=False))
    (line,) = file.getvalue().splitlines()
    assert line.startswith(f"lockstep check: one_process: {EVIL}: process 0 launches zeros at train.py:7")
    assert line.endswith("; process 1 launches nothing more")


def test_a_run_that_failed_is_not_clean():
    failed = result(code=1, end=End.FAILED)
    assert failed.exit_code == 1 and "exit code 1" in failed.problem and "compared up to there" in printed(failed)
    assert "! nothing found up to there" in printed(failed) and "✓" not in printed(failed) + render_page(failed)


def test_the_page_runs_no_script_and_escapes_what_is_in_it(finding, tmp_path):
    write_page(result(finding), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page == render_page(result(finding))
    assert "default-src 'none'; style-src 'sha256-" in page
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "train.py:7" in page and "tracker.py:3 in log" in page
