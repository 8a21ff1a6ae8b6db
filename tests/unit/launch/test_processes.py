"""The processes of a job on this machine: output, and how a job ends. The commands are tiny programs."""

import os
import pty
import signal
import stat
import subprocess
import sys
import tempfile
import time

import pytest

from lockstep.exits import KILLED, PEER_FAILED, describe_code
from tests.unit.launch.test_failure import GLOO, OWN, TOLD
from tests.unit.launch.test_machines import LAUNCHER

PRELUDE = """\
import os, pathlib, signal, subprocess, sys, time
i = int(os.environ['LOCKSTEP_PROCESS_ID'])
def show(*words):  # and wait until all other processes of the job have shown something
    print(*words, flush=True)
    shown = pathlib.Path(os.environ['SHOWN'])
    (shown / str(i)).touch()
    while len(list(shown.iterdir())) < int(os.environ['LOCKSTEP_NUM_PROCESSES']): time.sleep(.01)
"""


def command(program: str, *options: str, processes: int = 2) -> list[str]:
    options = ("--processes", str(processes), "--grace_s", "2", *options)
    return [sys.executable, str(LAUNCHER), *options, "--", "python", "-u", "-c", PRELUDE + program]


def run(program: str, *options: str, processes: int = 2, **kwargs) -> subprocess.CompletedProcess[str]:
    arguments = command(program, *options, processes=processes)
    with tempfile.TemporaryDirectory() as shown:
        environment = {**kwargs.pop("env", os.environ), "SHOWN": shown}
        return subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment, **kwargs)


def background(program: str, *options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Started, and both processes have printed 'ready' and their pid."""
    process = subprocess.Popen(command(program, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().split() for _ in range(2))
    assert [line[:2] for line in lines] == [["[0]", "ready"], ["[1]", "ready"]], lines
    return process, [int(line[2]) for line in lines]


def gone(pid: int) -> bool:
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_output_is_prefixed_and_whole():
    done = run("print('hello'); sys.stderr.write('no end of line')")
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == sorted(f"[{i}] {t}" for i in (0, 1) for t in ("hello", "no end of line"))
    assert run("print('hello')", "--prefix", "never").stdout == "hello\nhello\n"


def test_what_gloo_prints_of_each_connection_is_left_out(tmp_path):
    end = " is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    lines = [f"[Gloo] Rank 0{end}", f"[Gloo] Rank [Gloo] Rank 1{end}", f"0{end}"]
    kept = [f"loss 1 [Gloo] Rank 0{end}", "[Gloo] Rank 0 is not connected", "0", ""]
    logs = tmp_path / "logs"
    done = run(f"print({chr(10).join(lines + kept)!r})", "--log_dir", str(logs), processes=1)
    assert done.stdout.splitlines() == [f"[0] {line}" for line in kept]
    assert (logs / "process-0.log").read_text().splitlines() == kept


def test_one_fails_all_end(tmp_path):
    program = "show('pid', os.getpid())\nif i == 1: sys.exit('boom')\ntime.sleep(600)"
    done = run(program, "--log_dir", str(tmp_path / "logs"))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"launch: process 1 failed, {describe_code(1)}, after ")
    assert lines[1] == "launch: its last lines:" and lines[2].startswith("[1] pid") and lines[3] == "[1] boom"
    assert lines[4] == "launch: ending the other 1 process(es)"
    assert lines[-1].startswith("launch: failed: process 1, exit code 1")
    assert (tmp_path / "logs" / "process-1.log").read_text().splitlines()[1] == "boom"
    assert gone(int((tmp_path / "logs" / "process-0.log").read_text().split()[1]))


def test_who_is_told_of_a_failure_and_ends_first_is_not_named():
    told = TOLD.replace("process 2", "processes 0, 2")
    done = run(f"if i == 1: sys.exit(1)\ntime.sleep(.2); print({told!r}, flush=True); time.sleep(.1); sys.exit(1)")
    assert done.stderr.splitlines()[0].startswith(f"launch: process 0 failed, {describe_code(1)}, after ")
    assert "last lines" not in done.stderr and f"[0] {told}" in done.stdout and done.returncode == 1


def test_a_process_that_ended_because_of_another_waits_for_that_one_to_be_named():
    """One of lockstep that fails gives its peers 3 s to go first."""
    done = run(f"time.sleep(1.5 * i); sys.exit([{PEER_FAILED}, 3][i])")
    assert (
        done.stderr.splitlines()[0].startswith("launch: process 1 failed, exit code 3, after ") and done.returncode == 3
    )


def test_the_end_of_a_process_is_told_in_the_words_of_the_table():
    done = run("os.kill(os.getpid(), signal.SIGKILL)", processes=1)
    assert f"launch: process 0 failed, {describe_code(KILLED)}, after " in done.stderr and done.returncode == KILLED


def test_the_error_of_a_process_that_has_not_ended_yet_is_shown():
    program = f"if i == 1: print({OWN!r}, flush=True); time.sleep(600)\ntime.sleep(.2); sys.exit({GLOO!r})"
    lines = run(program, "--grace_s", "0.2").stderr.splitlines()
    assert lines[0].startswith(f"launch: process 0 failed, {describe_code(1)}, after ")
    assert lines[1] == "launch: process 1 failed before, its last lines:"
    assert "\n".join(lines[2:5]) == "\n".join(f"[1] {line}" for line in OWN.splitlines())


def test_a_fault_is_tried_again_and_a_second_one_without_a_checkpoint_is_not(tmp_path):
    """The commands end as processes of lockstep do (lockstep.hosts.fault)."""
    program = "n = int(os.environ['LOCKSTEP_RESTARTS']); print('attempt', n)\nsys.exit(0 if i else 93 + min(1, n))"
    done = run(program, "--retries", "5", "--log_dir", str(tmp_path))
    assert done.returncode == 94 and "launch: trying again, 1 of 5" in done.stderr, done.stderr
    assert (tmp_path / "process-1.log").read_text() == "attempt 0\nattempt 1\n"
    assert run("sys.exit(i)", "--retries", "5").stderr.count("launch: failed") == 1, "a mistake stays one"


@pytest.mark.slow
def test_exit_codes_and_a_peer_that_does_not_want_to_end():
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nshow('ready')\nif i == 1: "
    assert run(ignore + "sys.exit(7)\ntime.sleep(600)").returncode == 7
    assert run(ignore + "os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)").returncode == 137
    # The one that raised is named, not the one that was aborted in consequence.
    both = run("time.sleep(.1)\nif i == 0: os.abort()\nsys.exit(3)")
    assert both.returncode == 3 and "launch: failed: process 1" in both.stderr
    peer = run("if i == 0: sys.exit(85)\ntime.sleep(.2); sys.exit(4)")
    assert peer.returncode == 4 and "launch: process 1 failed" in peer.stderr


def test_no_grandchild_survives():
    done = run("child = subprocess.Popen(['sleep', '600']); show(child.pid); sys.exit(i)")
    assert done.returncode == 1
    children = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(children) == 2 and all(map(gone, children))


def test_ctrl_c_is_passed_on_and_quiet():
    process, pids = background("print('ready', os.getpid()); time.sleep(600)")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "launch: SIGINT, stopping 2 process(es); they have 2 s" in output and "[1]" not in output
    assert all(gone(pid) for pid in pids)


def test_sigterm_gives_time_to_save():
    save = "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
    process, _ = background(save + "print('ready', os.getpid()); time.sleep(600)")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "[0] saved" in output


@pytest.mark.parametrize("again", [False, True])
def test_what_ignores_ctrl_c_is_killed(again):
    """At once, or after --grace_s."""
    program = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', os.getpid()); time.sleep(600)"
    process, _ = background(program, "--grace_s", "600" if again else "1")
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    if again:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert again or time.monotonic() - begin > 0.8


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children of a killed parent on Linux only")
def test_killing_the_launcher_ends_the_processes():
    process, pids = background("print('ready', os.getpid()); time.sleep(600)")
    process.kill()
    process.communicate(timeout=60)
    assert all(gone(pid) for pid in pids)


def test_the_leader_keeps_the_terminal():
    ours, theirs = pty.openpty()
    arguments = command("sys.stdout.write('tty\\n' if sys.stdout.isatty() else 'pipe\\n')")  # in one piece
    process = subprocess.Popen(arguments, stdout=theirs, stderr=theirs)
    assert process.wait(timeout=60) == 0
    os.close(theirs)
    assert sorted(os.read(ours, 4096).decode().split("\r\n")) == ["", "[1] pipe", "tty"]
    os.close(ours)


@pytest.mark.slow
def test_a_flood_on_one_pipe_does_not_hide_the_other():
    program = "show('ready')\nif i == 1: sys.exit(5)\nwhile True: print('x' * 1000)"
    assert run(program).returncode == 5


def test_an_error_of_every_process_is_shown_once(tmp_path):
    done = run(
        "print('error: no such file'); time.sleep(0.3 * i); sys.exit(1)", "--log_dir", str(tmp_path), processes=3
    )
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("error: no such file") == 1
    logs = [(tmp_path / f"process-{i}.log").read_text() for i in range(3)]
    assert logs == ["error: no such file\n"] * 3


def test_an_exported_secret_is_in_no_log_and_logs_are_their_owners(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_AUTH", "hush-hush-hush")
    done = run("print('got', os.environ['HF_AUTH'])", "--log_dir", str(tmp_path / "logs"), processes=1)
    log = tmp_path / "logs" / "process-0.log"
    assert log.read_text() == "got <redacted>\n" and stat.S_IMODE(log.stat().st_mode) == 0o600
    assert done.returncode == 0 and "hush" not in done.stdout + done.stderr
