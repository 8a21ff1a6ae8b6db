"""A job that is left alone: status, logs, stop and delete from other launchers."""

import signal

import pytest

from lockstep.exits import DONE, FAILED, TERMINATED, UNREACHABLE
from lockstep.launch import BACKENDS, main, parse
from lockstep.launch.backend import LaunchError
from lockstep.launch.machines import Ssh
from lockstep.launch.record import Attempt, new_record
from lockstep.launch.worker_jobs import WorkerJobs
from tests.fake_cloud.cloud import wait_for

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


def test_a_job_of_which_a_worker_cannot_be_reached_is_not_deleted(cloud, launch, capsys):
    assert launch("--hosts", cloud.add("a", "b"), *FAST, "--", "sleep", "1000") == DONE
    cloud.set("b", "down")
    assert launch("delete", "job") == UNREACHABLE
    said = capsys.readouterr().err
    assert "worker b cannot be reached: ssh: connect to host b" in said
    assert "job is not deleted: its command may still run there" in said
    assert cloud.processes("b") and not cloud.record("job")["deleted"]
    wait_for(lambda: not cloud.processes("a"))
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
    assert launch("delete", "job", backends={"ssh": WorkerJobs(Rented())}) == DONE
    assert cloud.record("job")["deleted"]


@pytest.mark.slow
def test_a_job_that_somebody_stops_is_not_started_again(cloud):
    text = "trap 'exit 143' TERM; echo begin; sleep 60 & wait"
    words = ("--hosts", cloud.add("a"), "--no-preflight", "--name", "job", "--retries", "2", "--", "sh", "-c", text)
    process = cloud.start(*words)
    assert process.stdout.readline() == "[0] begin\n"
    assert cloud.launch("stop", "job").returncode == DONE
    _, errors = process.communicate(timeout=60)
    assert process.returncode == TERMINATED and "(the launcher asked for it)" in errors
    assert len(cloud.record("job")["attempts"]) == 1


def test_a_job_that_cannot_start_is_known_at_once(cloud):
    done = cloud.launch("--hosts", cloud.add("a"), *FAST, "--", "sh", "-c", "echo 'error: no file'; exit 1")
    assert done.returncode == FAILED and "[0] error: no file" in done.stdout
    assert cloud.record("job")["attempts"][0]["code"] == FAILED


def test_a_job_that_nobody_knows_is_an_error_that_names_those_there_are(cloud):
    (cloud.jobs / "job").mkdir(parents=True)
    (cloud.jobs / "job" / "job.json").touch()
    done = cloud.launch("stop", "jab")
    assert done.returncode == 1 and f"error: no job 'jab' in {cloud.jobs}; there is job." in done.stderr
