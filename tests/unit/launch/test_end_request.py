"""A job that somebody stops or deletes while a launcher works for it: in a wait, between two attempts, as it starts."""

import argparse
import dataclasses
import time
from types import SimpleNamespace

import pytest

from lockstep.exits import DONE, FAULT, TERMINATED, UNAVAILABLE
from lockstep.launch import main
from lockstep.launch.backend import LaunchError
from lockstep.launch.end_request import EndRequest, ask_to_end
from lockstep.launch.machines import Ssh
from lockstep.launch.record import load_record, new_record


def test_a_request_is_for_who_has_begun_before_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path))
    job = new_record(argparse.Namespace(backend="ssh", command=["true"]), "job")
    job.save()
    first = EndRequest(job)
    assert first.command() == ""
    ask_to_end(job, "stop")
    second = EndRequest(job)
    assert (first.command(), second.command()) == ("stop", "")
    ask_to_end(job, "stop")
    assert (first.command(), second.command()) == ("stop", "stop")
    ask_to_end(job, "delete")
    assert (first.command(), second.command()) == ("delete", "delete")


class Asked(Ssh):
    """Hosts; while they are waited for, or at the end of that, somebody ends the job."""

    def __init__(self, command, then):
        self.command, self.then, self.asked = command, then, 0

    def acquire(self, options, console):
        self.asked += 1
        assert not self.given_up()
        ask_to_end(load_record("job"), self.command)
        if self.command == "delete":
            dataclasses.replace(load_record("job"), deleted=True).save()
        assert self.given_up()
        if self.then is not None:
            raise self.then
        return super().acquire(options, console)


@pytest.fixture
def here(cloud, monkeypatch):
    """This process is the launcher."""
    for name in ("PATH", "HOME", "FAKE_CLOUD", "LOCKSTEP_JOBS_DIR"):
        monkeypatch.setenv(name, cloud.environment[name])
    monkeypatch.setattr("lockstep.launch.worker_jobs.RETRY_PAUSE_S", 0.0)
    return cloud


@pytest.mark.parametrize("command", ["stop", "delete"])
@pytest.mark.parametrize(
    "then", [None, LaunchError("no capacity", UNAVAILABLE), LaunchError("no machines")], ids=["come", "away", "refused"]
)
def test_a_launcher_that_waits_for_machines_ends_and_starts_nothing(here, capfd, command, then):
    backend = Asked(command, then)
    words = ["--backend", "own", "--hosts", here.add("a"), "--no-preflight", "--name", "job", "--retries", "3"]
    assert main([*words, "--", "true"], {"own": lambda: backend}) == TERMINATED
    assert f"job job was ended by lockstep launch {command}, and is not started again" in capfd.readouterr().err
    (attempt,) = load_record("job").attempts
    assert (backend.asked, attempt.launched, attempt.code) == (1, False, TERMINATED)
    assert attempt.cause == f"ended by lockstep launch {command}" and load_record("job").deleted == (
        command == "delete"
    )
    assert not list(here.hosts_directory.rglob("attempt-*"))


def test_a_launcher_between_two_attempts_does_not_begin_the_second(here, monkeypatch, capfd):
    """`stop` finds nothing that runs, and says so; the launcher must not start anything after that."""

    def pause(seconds):
        assert main(["stop", "job"]) == DONE

    monkeypatch.setattr("lockstep.launch.worker_jobs.time", SimpleNamespace(time=time.time, sleep=pause))
    words = ("--hosts", here.add("a"), "--no-preflight", "--name", "job", "--retries", "3")
    assert main([*words, "--", "sh", "-c", f"exit {FAULT}"]) == TERMINATED
    assert "job job was ended by lockstep launch stop" in capfd.readouterr().err
    assert [each.code for each in load_record("job").attempts] == [FAULT]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stop", "delete"])
def test_a_job_that_somebody_ends_is_not_started_again_by_its_launcher(cloud, command):
    text = "trap 'exit 143' TERM; echo begin; sleep 60 & wait"
    words = ("--hosts", cloud.add("a"), "--no-preflight", "--name", "job", "--retries", "2", "--", "sh", "-c", text)
    process = cloud.start(*words)
    assert process.stdout.readline() == "[0] begin\n"
    assert cloud.launch(command, "job").returncode == DONE
    _, errors = process.communicate(timeout=60)
    assert process.returncode == TERMINATED and "(the launcher asked for it)" in errors
    assert f"job job was ended by lockstep launch {command}" in errors and "taken away" not in errors
    record = cloud.record("job")
    assert [each["code"] for each in record["attempts"]] == [TERMINATED] and record["deleted"] == (command == "delete")
    again = cloud.launch("--hosts", "a", "--no-preflight", "--name", "job", "--", "true")
    assert again.returncode == DONE and not cloud.record("job")["deleted"]
