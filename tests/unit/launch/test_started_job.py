"""A job that is left alone: status, logs, stop and delete from other launchers."""

import signal
import threading

import pytest

from lockstep.exits import DONE, FAILED, TERMINATED, UNREACHABLE
from lockstep.launch import BACKENDS, main, parse
from lockstep.launch.backend import LaunchError
from lockstep.launch.machines import Ssh
from lockstep.launch.record import Attempt, new_record
from tests.clock import until

FAST = ("--no-preflight", "--no-foreground", "--grace_s", "5", "--name", "job")


@pytest.fixture
def running(cloud):
    """A job on two hosts that waits for a file, started by a launcher that has ended."""
    text = "trap 'echo saved; exit 143' TERM; echo begin; until [ -e ~/go ]; do sleep .05; done; echo end; cat ~/code"
    done = cloud.launch("--hosts", cloud.add("a", "b"), *FAST, "--", "sh", "-c", f"{text}; exit $(cat ~/code)")
    assert (done.returncode, done.stdout.count("begin")) == (DONE, 2), done.stderr
    assert "it runs; now: lockstep launch status|logs -f|stop|delete job" in done.stderr
    return cloud


@pytest.fixture
def launch(cloud, monkeypatch):
    """The launcher within this process; one that leaves a job alone does not watch it first."""
    for name in ("PATH", "HOME", "FAKE_CLOUD", "LOCKSTEP_JOBS_DIR"):
        monkeypatch.setenv(name, cloud.environment[name])
    monkeypatch.setattr("lockstep.launch.attempt.DETACH_S", 0.0)
    return lambda *words, backends=BACKENDS: main(words, backends)


def end(cloud, *codes):
    for host, code in zip("ab", codes, strict=True):
        (cloud.hosts_directory / host / "code").write_text(f"{code}\n")
        (cloud.hosts_directory / host / "go").touch()
    assert cloud.wait_until_empty()


def test_status_and_logs_while_it_runs_and_when_it_has_ended(running):
    status = running.launch("status", "job")
    assert status.returncode == DONE
    lines = status.stdout.splitlines()
    assert lines[0].startswith("job job (ssh), attempt 1, started ") and lines[1].startswith("[0] a: running for ")
    running.set("b", "down")
    away = running.launch("status", "job")
    assert away.returncode == UNREACHABLE and "[1] b: cannot be reached: ssh: connect to host b" in away.stdout
    running.unset("b", "down")
    now = running.launch("logs", "job")
    assert (now.returncode, sorted(now.stdout.splitlines())) == (DONE, ["[0] begin", "[1] begin"])

    follower = running.start("logs", "-f", "job")
    assert {follower.stdout.readline() for _ in range(2)} == {"[0] begin\n", "[1] begin\n"}
    end(running, 0, 1)
    output, _ = follower.communicate(timeout=60)
    assert sorted(output.splitlines()) == ["[0] 0", "[0] end", "[1] 1", "[1] end"]
    assert follower.returncode == FAILED

    ended = running.launch("status", "job")
    assert ended.returncode == FAILED
    assert "[0] a: exit code 0, done" in ended.stdout and "[1] b: exit code 1, failed" in ended.stdout
    assert "it has ended: exit code 1, failed" in ended.stdout and "worker b failed first" in ended.stdout
    # All that was printed is kept here, once, and can be shown when the hosts are gone.
    running.set("a", "gone")
    kept = running.launch("logs", "job")
    assert sorted(kept.stdout.splitlines()) == sorted(f"[{i}] {t}" for i in (0, 1) for t in ("begin", "end", i))


def test_stop_gives_time_to_save_and_delete_leaves_only_the_logs(running):
    follower = running.start("logs", "-f", "job")
    follower.stdout.readline()
    follower.send_signal(signal.SIGINT)  # who looks does not end it
    _, errors = follower.communicate(timeout=60)
    assert "no longer followed; job job goes on" in errors and len(running.processes()) >= 2

    again = running.launch("--hosts", "a,b", *FAST, "--", "true")
    assert "of this job still runs there" in again.stderr and "lockstep launch stop" in again.stderr

    stopped = running.launch("stop", "job")
    assert stopped.returncode == DONE
    assert stopped.stdout.count(f"exit code {TERMINATED}") == 2 and stopped.stdout.count("(stopped)") == 2
    assert running.wait_until_empty()
    deleted = running.launch("delete", "job")
    assert deleted.returncode == DONE and "its logs stay in " in deleted.stderr
    assert not list(running.hosts_directory.rglob("worker-*"))
    assert sorted(path.name for path in running.jobs.rglob("worker-*")) == ["worker-0.log", "worker-1.log"]
    gone = running.launch("status", "job")
    assert gone.returncode == DONE and "job was deleted" in gone.stderr


@pytest.mark.slow
def test_the_worker_with_an_error_of_its_own_is_named_of_a_job_that_nobody_has_watched(cloud, launch, capsys):
    """The other one was told of it, and has ended before."""
    told = "error: 1 of 2 processes failed at 'reading prompts'. process 0: PromptError: no field"
    text = f'[ $LOCKSTEP_PROCESS_ID = 1 ] || {{ echo "{told}"; until [ -e ~/../b/ended ]; do sleep .02; done; }}; '
    text += "touch ~/ended; [ $LOCKSTEP_PROCESS_ID = 1 ] || sleep .2; exit 1"
    assert launch("--hosts", cloud.add("a", "b"), *FAST, "--", "sh", "-c", text) == DONE
    assert cloud.wait_until_empty() and launch("status", "job") == FAILED
    assert "worker a failed first" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_of_which_a_worker_cannot_be_reached_is_not_deleted(cloud, launch, capsys):
    assert launch("--hosts", cloud.add("a", "b"), *FAST, "--", "sleep", "1000") == DONE
    cloud.set("b", "down")
    assert launch("delete", "job") == UNREACHABLE
    said = capsys.readouterr().err
    assert "worker b cannot be reached: ssh: connect to host b" in said
    assert "job is not deleted: its command may still run there" in said
    assert cloud.processes("b") and not cloud.record("job")["deleted"]
    until(lambda: not cloud.processes("a"))
    cloud.unset("b", "down")
    assert launch("delete", "job") == DONE and cloud.record("job")["deleted"]
    assert cloud.wait_until_empty() and not list(cloud.hosts_directory.rglob("worker-*"))


class Rented(Ssh):
    """Hosts that are given back."""

    released = False

    def find(self, options):
        if self.released:
            raise LaunchError("they are gone")
        return super().find(options)

    def release(self, options, console):
        self.released = True


def test_a_job_is_deleted_with_its_workers_whether_they_can_be_reached_or_not(cloud, launch):
    options = parse(["--hosts", cloud.add("a", "b"), *FAST, "--", "x"])
    new_record(options, "job").with_attempt(Attempt(number=1, id="attempt-1", started=0.0, launched=True)).save()
    cloud.set("b", "down")
    assert launch("delete", "job", backends={"ssh": Rented}) == DONE
    assert cloud.record("job")["deleted"]


def test_a_job_of_somebody_else_with_the_same_name_goes_on(cloud, launch, monkeypatch, tmp_path, capsys):
    backend = Rented()
    options = parse(["--hosts", cloud.add("a"), *FAST, "--", "x"])
    new_record(options, "job").with_attempt(Attempt(number=1, id="attempt-1", started=0.0, launched=True)).save()
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path / "theirs"))
    assert launch("--hosts", "a", *FAST, "--", "sleep", "1000") == DONE
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", cloud.environment["LOCKSTEP_JOBS_DIR"])
    for command in ("stop", "delete"):
        assert launch(command, "job", backends={"ssh": lambda: backend}) != DONE
        assert "somebody else has a job of this name. Nothing was ended" in capsys.readouterr().err
    assert cloud.processes("a") and not cloud.record("job")["deleted"] and not backend.released
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path / "theirs"))
    assert launch("delete", "job") == DONE and cloud.wait_until_empty()


WAITING = "echo begin; touch ~/begun; until [ -e ~/go ]; do sleep .02; done; seq 1000; printf 'no end of line'; exit 1"
PRINTED = ["begin", *map(str, range(1, 1001)), "no end of line"]


def printed(cloud):
    """What is in the log on the worker, attempt by attempt."""
    return [path.read_bytes() for path in sorted(cloud.hosts_directory.rglob("attempt-*/log"))]


def kept(cloud):
    """What is in the files that are kept of the job, attempt by attempt."""
    return [path.read_bytes() for path in sorted(cloud.jobs.rglob("worker-0.log"))]


def test_launchers_that_follow_at_the_same_time_keep_the_log_of_the_worker(cloud, launch, capsys):
    hosts = cloud.add("a")

    def follow():
        followers = [threading.Thread(target=launch, args=("logs", "-f", "job")) for _ in range(2)]
        try:
            until((cloud.hosts_directory / "a" / "begun").exists)
            calls = len(cloud.calls())
            for follower in followers:
                follower.start()
            until(lambda: len(cloud.calls()) >= calls + 2)
        finally:
            (cloud.hosts_directory / "a" / "go").touch()
        for follower in followers:
            follower.join()

    thread = threading.Thread(target=follow)
    thread.start()
    assert launch("--hosts", hosts, "--no-preflight", "--name", "job", "--", "sh", "-c", WAITING) == FAILED
    thread.join()
    assert kept(cloud) == printed(cloud) and printed(cloud)[0].decode().split("\n") == PRINTED
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[0] ")]
    assert sorted(shown) == sorted(f"[0] {line}" for line in PRINTED for _ in range(3))


@pytest.mark.slow
def test_no_line_of_a_job_that_was_left_alone_is_lost_when_its_end_is_noted_or_it_is_deleted(cloud, launch, capsys):
    """The first attempt ends unseen, the second is noted by ``status``, the third ended by ``delete``."""
    hosts = cloud.add("a")

    def shown():
        capsys.readouterr()
        assert launch("logs", "job") == DONE
        return capsys.readouterr().out.splitlines()

    for number in (1, 2):
        (cloud.hosts_directory / "a" / "go").unlink(missing_ok=True)
        assert launch("--hosts", hosts, *FAST, "--", "sh", "-c", WAITING) == DONE
        (cloud.hosts_directory / "a" / "go").touch()
        assert cloud.wait_until_empty() and len(printed(cloud)) == number
    assert launch("status", "job") == FAILED
    assert shown() == [f"[0] {line}" for line in PRINTED]
    (cloud.jobs / "job" / "attempt-2" / "worker-0.log").write_text("beg")  # a launcher was ended as it noted the end
    assert shown() == [f"[0] {line}" for line in PRINTED]
    text = "trap 'echo saved; exit' TERM; touch ~/ready; sleep 1000 & wait"
    assert launch("--hosts", hosts, *FAST, "--", "sh", "-c", text) == DONE
    until((cloud.hosts_directory / "a" / "ready").exists)
    assert launch("delete", "job") == DONE and not printed(cloud)
    assert [each.decode().split("\n") for each in kept(cloud)] == [PRINTED, PRINTED, ["saved", ""]]
    assert shown() == ["[0] saved"]


def test_a_job_that_cannot_start_is_known_at_once(cloud):
    done = cloud.launch("--hosts", cloud.add("a"), *FAST, "--", "sh", "-c", "echo 'error: no file'; exit 1")
    assert done.returncode == FAILED and "[0] error: no file" in done.stdout
    assert cloud.record("job")["attempts"][0]["code"] == FAILED


def test_a_job_that_nobody_knows_is_an_error_that_names_those_there_are(cloud):
    (cloud.jobs / "job").mkdir(parents=True)
    (cloud.jobs / "job" / "job.json").touch()
    done = cloud.launch("stop", "jab")
    assert done.returncode == 1 and f"error: no job 'jab' in {cloud.jobs}; there is job." in done.stderr
