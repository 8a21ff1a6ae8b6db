"""A command on several workers, behind a fake ssh that really runs it: output, failures, drops, signals, the lease."""

import json
import signal
import threading
import time

import pytest

from lockstep.exits import INTERRUPTED, KILLED, SETUP_FAILED, TERMINATED, UNREACHABLE, WORKER_LOST
from lockstep.launch.attempt import AttemptSpec, RunningAttempt
from lockstep.launch.backend import Console
from lockstep.launch.failure import CAUSE_S
from lockstep.launch.follower import Event
from lockstep.launch.job_loop import ASKED, REPORT_S
from lockstep.launch.machines import SshTransport, Worker
from tests.clock import until


def attempt(tmp_path, names="a", why_lost=lambda: None, given_up=lambda: False):
    """An attempt that nothing was started of."""
    limits = {"grace_s": 60.0, "lease_s": 120.0, "unreachable_s": 120.0}
    logs, n = [tmp_path / f"worker-{name}.log" for name in names], len(names)
    spec = AttemptSpec(
        id="x", roots=["~"] * n, starts=[{}] * n, logs=logs, skews_s=[None] * n, foreground=True, **limits
    )
    transport = SshTransport([Worker(name=name) for name in names], [[]] * n)
    return RunningAttempt(transport, spec, Console(), why_lost, given_up)


@pytest.mark.parametrize(("reason", "seconds"), [(ASKED, 60.0), ("the worker is shut down", REPORT_S)])
def test_after_a_stop_each_process_has_its_grace_though_another_has_ended(tmp_path, reason, seconds):
    made = attempt(tmp_path, "ab")
    for follower in made._followers.by_worker:
        follower.connected = True
    end = {"state": "ended", "code": TERMINATED, "ended": time.time(), "reason": reason}
    made._take(Event(worker=0, kind="result", result=end))
    made._failed_at -= 2 * CAUSE_S
    begin = time.monotonic()
    made._find_cause()
    assert begin + seconds <= made._terminate_at <= time.monotonic() + seconds


def test_a_job_that_was_ended_as_its_command_started_is_ended_again_and_is_no_lost_worker(tmp_path):
    given_up = False
    made = attempt(tmp_path, given_up=lambda: given_up)
    (follower,) = made._followers.by_worker
    made._take(Event(worker=0, kind="started"))
    assert follower.wanted == ""
    given_up = True
    made._take(Event(worker=0, kind="started"))
    assert follower.wanted == "stop"
    made._take(Event(worker=0, kind="result", result={"state": "absent"}))
    assert (made.endings[0].code, made.endings[0].reason) == (TERMINATED, ASKED)


def test_what_the_platform_said_of_an_earlier_break_ends_no_worker_at_a_later_one(tmp_path):
    made = attempt(tmp_path, why_lost=lambda: "node pod is REPAIRING")
    (follower,) = made._followers.by_worker
    made._ask_platform()  # its worker is back before the answer is
    follower.connected = True
    made._find_lost(time.monotonic())
    follower.connected, follower.away_since = False, time.monotonic()
    made._find_lost(time.monotonic())
    assert not made.endings
    made._ask_platform()
    made._find_lost(time.monotonic())
    assert made.endings[0].reason == "node pod is REPAIRING"


FAST = ("--no-preflight", "--grace_s", "2", "--name", "job")


def script(text):
    return ["--", "sh", "-c", text]


def logs(cloud, attempt=1):
    paths = sorted((cloud.jobs / "job" / f"attempt-{attempt}").glob("worker-*.log"))
    return [path.read_text() for path in paths]


def test_all_workers_run_it_once_and_their_output_is_shown_and_kept(cloud):
    hosts = cloud.add("a", "b", "c", "d")
    text = "echo ran >> ~/ran; echo $LOCKSTEP_PROCESS_ID/$LOCKSTEP_NUM_PROCESSES $REQUIRE_JAX_PROCESS_COUNT $A $HOME"
    done = cloud.launch(
        "--hosts", hosts, *FAST, "--env", "A=x y", *script(text + " $LOCKSTEP_COORDINATOR_ADDRESS; sleep 60 &")
    )
    assert done.returncode == 0, done.stderr
    wanted = [f"{i}/4 4 x y {cloud.hosts_directory / name} a:8476" for i, name in enumerate("abcd")]
    assert sorted(done.stdout.splitlines()) == [f"[{i}] {line}" for i, line in enumerate(wanted)]
    assert logs(cloud) == [line + "\n" for line in wanted]
    assert [(cloud.hosts_directory / name / "ran").read_text() for name in "abcd"] == ["ran\n"] * 4
    (attempt,) = cloud.record("job")["attempts"]
    assert (attempt["code"], attempt["cause"]) == (0, "") and attempt["ended"] > attempt["started"]
    assert cloud.wait_until_empty()  # also what the command has left behind


def test_the_first_failure_ends_the_rest_and_its_last_lines_come_first(cloud):
    """Worker 0 ends because of another one, worker 1 by an error of its own a little later, worker 2 never."""
    text = """case $LOCKSTEP_PROCESS_ID in
        0) exit 85;;
        1) sleep .5; echo before; echo boom; exit 3;;
        2) trap 'echo saved; exit 1' TERM; sleep 600 & wait;;
    esac"""
    done = cloud.launch("--hosts", cloud.add("a", "b", "c"), *FAST, "--retries", "2", *script(text))
    assert done.returncode == 3
    lines = [line for line in done.stderr.splitlines() if line.startswith("launch: worker") or line.startswith("[")]
    assert lines[0].startswith("launch: worker b (process 1) failed, exit code 3, after ")
    assert lines[1:] == ["[1] before", "[1] boom"]
    assert "launch: ending the other 1 process(es)" in done.stderr and "[2] saved" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("launch: failed: worker b (process 1), exit code 3")
    # What the user has to mend is not tried again.
    assert [each["code"] for each in cloud.record("job")["attempts"]] == [3]


def test_a_worker_that_was_told_of_a_failure_and_ends_first_is_not_named(cloud):
    told = "error: 1 of 2 processes failed at 'reading prompts'. process 0: PromptError: no field"
    text = f'[ $LOCKSTEP_PROCESS_ID = 1 ] || {{ echo "{told}"; sleep .3; }}; exit 1'
    done = cloud.launch("--hosts", cloud.add("a", "b"), *FAST, *script(text))
    assert done.returncode == 1 and f"[0] {told}" in done.stdout
    assert "launch: worker a (process 0) failed, exit code 1" in done.stderr and "last lines" not in done.stderr


def test_a_worker_that_cannot_be_reached_is_named_and_nothing_is_started(cloud):
    hosts = cloud.add("a", "b")
    cloud.set("b", "down")
    done = cloud.launch("--hosts", hosts, *FAST, "--unreachable_s", "0.3", *script("touch ~/ran"))
    assert done.returncode == UNREACHABLE
    assert "error: worker b cannot be reached: ssh: connect to host b port 22: Connection refused" in done.stderr
    assert "Tried for 0.3 s (--unreachable_s)" in done.stderr and "Traceback" not in done.stderr
    assert not (cloud.hosts_directory / "a" / "ran").exists()


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_once_gives_time_to_save_and_twice_kills(cloud, twice):
    trap = "trap '' TERM" if twice else "trap 'echo saved; exit 0' TERM"
    text = f"{trap}; echo ready; sleep 600 & while :; do wait; done"
    process = cloud.start("--hosts", cloud.add("a", "b"), *FAST, "--grace_s", "600", *script(text))
    ready = [process.stdout.readline() for _ in range(2)]
    assert sorted(ready) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(signal.SIGINT)
    if twice:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "SIGINT, stopping 2 process(es); they have 600 s to save" in errors
    assert ("killing 2 process(es)" in errors) == twice
    assert logs(cloud) == ["ready\n" if twice else "ready\nsaved\n"] * 2
    assert cloud.wait_until_empty() and len(cloud.record("job")["attempts"]) == 1


@pytest.mark.slow
def test_a_job_whose_launcher_is_gone_stops_by_its_lease(cloud):
    text = "trap 'echo saved; exit 0' TERM; echo ready; sleep 600 & wait"
    process = cloud.start("--hosts", cloud.add("a"), *FAST, "--lease_s", "3", *script(text))
    assert process.stdout.readline() == "[0] ready\n"
    time.sleep(3.5)  # as long as the launcher is there, so is the job
    assert process.poll() is None and cloud.processes()
    process.kill()
    process.communicate(timeout=60)
    assert cloud.wait_until_empty()
    (note,) = cloud.hosts_directory.rglob("exit.json")
    assert json.loads(note.read_text())["reason"] == "nothing was heard of the launcher for 3 s"
    assert note.with_name("log").read_text() == "ready\nsaved\n"


@pytest.mark.slow
def test_a_job_is_started_again_when_a_worker_was_taken_away(cloud):
    """The host is gone with all that ran on it, and comes back with an empty disk."""
    hosts = cloud.add("a", "b")
    text = "echo attempt $LOCKSTEP_RESTARTS; [ -e ~/second ] && exit 0; sleep 60"
    words = ("--hosts", hosts, *FAST, "--retries", "1", "--unreachable_s", "2", *script(text))
    process = cloud.start(*words)
    assert {process.stdout.readline() for _ in range(2)} == {"[0] attempt 0\n", "[1] attempt 0\n"}
    cloud.set("b", "gone")
    until(lambda: "trying again in" in (cloud.jobs / "job" / "launcher.log").read_text())
    for name in "ab":
        (cloud.hosts_directory / name / "second").touch()
    cloud.unset("b", "gone")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "worker b (process 1) failed, exit code 87, a worker was taken away" in errors
    assert [each["code"] for each in cloud.record("job")["attempts"]] == [WORKER_LOST, 0]
    assert logs(cloud, 1) == ["attempt 0\n"] * 2 and logs(cloud, 2) == ["attempt 1\n"] * 2
    assert cloud.wait_until_empty()


@pytest.mark.slow
def test_a_killed_supervisor_is_a_lost_worker(cloud):
    process = cloud.start("--hosts", cloud.add("a", "b"), *FAST, *script("echo ready; sleep 60"))
    for _ in range(2):
        process.stdout.readline()
    cloud.set("b", "gone")
    until(lambda: not cloud.processes("b"))
    cloud.unset("b", "gone")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == WORKER_LOST
    assert "its processes are gone without a word" in errors
    assert cloud.wait_until_empty()


@pytest.mark.nightly
def test_a_flood_of_one_worker_hides_no_failure_and_no_signal(cloud):
    flood = "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done"
    text = f"[ $LOCKSTEP_PROCESS_ID = 1 ] && {{ sleep .5; exit 5; }}; {flood}"
    done = cloud.launch("--hosts", cloud.add("a", "b"), *FAST, *script(text))
    assert done.returncode == 5
    process = cloud.start("--hosts", "a", *FAST, *script(flood))
    threading.Thread(target=process.stdout.read, daemon=True).start()
    until(lambda: any(logs(cloud, 2)))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == INTERRUPTED


@pytest.mark.slow
def test_a_worker_without_python_is_no_worker(cloud):
    hosts = cloud.add("a", "b")
    cloud.set("b", "bare")
    done = cloud.launch("--hosts", hosts, *FAST, *script("true"))
    assert done.returncode == SETUP_FAILED and "a worker needs python3 (3.8 or newer)" in done.stderr


def test_a_process_that_is_killed_by_a_signal_has_its_code(cloud):
    done = cloud.launch("--hosts", cloud.add("a"), *FAST, *script("kill -9 $$"))
    assert done.returncode == KILLED and "exit code 137, killed" in done.stderr
