"""What is done on workers before the start, with answers that are made up; on fake hosts: test_worker_jobs.py."""

import threading
import time
import types

import pytest

from lockstep.exits import PREFLIGHT, SETUP_FAILED
from lockstep.launch import prepare as module
from lockstep.launch.backend import Console, LaunchError, Worker
from lockstep.launch.prepare import GIB, Preparation, on_all, prepare, problems


def facts(skew_s=0.0, **changes):
    answer = {
        "holders": [],
        "busy_ports": [],
        "closed": [],
        "disk": {"/home/me": 50 * GIB, "/tmp": 9 * GIB},
        "program": "/usr/bin/x",
        "versions": {"python": "3.12.1", "lockstep": "0.1.0"},
        "path": "/usr/bin",
    }
    return {**answer, **changes, "skew_s": skew_s}


def found(*given):
    workers = [Worker(name=f"w{index}") for index in range(len(given))]
    return problems(workers, given, "x")


def test_fit_workers():
    assert found(facts(), facts(skew_s=-20.0), facts(skew_s=20.0)) == []


def test_each_fault_names_the_worker_the_limit_and_the_fix():
    holder = {"pid": 77, "command": "python train.py", "device": "/dev/accel0"}
    for fact, text in (
        (facts(holders=[holder]), "worker w1: process 77 (python train.py) uses /dev/accel0"),
        (facts(holders=[holder]), "sudo kill 77"),
        (facts(busy_ports=[8476]), "worker w1: port 8476 is in use"),
        (facts(busy_ports=[8476]), "or take another one (ssh: --port; TPU VMs: --env JAX_COORDINATOR_PORT=11211)"),
        (facts(closed=["10.0.0.2:8482"]), "worker w1: it cannot reach 10.0.0.2:8482, where the job begins: a firewall"),
        (facts(disk={"/tmp": GIB}), "worker w1: 1.00 GiB are free in /tmp; at least 2 GiB are needed"),
        (facts(skew_s=31.0), "worker w1: its clock is 31 s ahead of this machine's; at most 30 s are allowed"),
        (facts(skew_s=-40.0), "worker w1: its clock is 40 s behind this machine's"),
        (facts(program=None), "worker w1: no program 'x' in /usr/bin"),
    ):
        (line,) = found(facts(), fact)
        assert text in line


def test_the_versions_of_most_workers_are_the_usual_ones():
    other = facts(versions={"python": "3.12.1", "lockstep": "0.2.0"})
    bare = facts(versions={})
    (line,) = found(facts(), other, facts())
    assert line.startswith("worker w1: lockstep is 0.2.0, but 0.1.0 on most workers; all must have the same")
    assert [line.split(",")[0] for line in found(bare, facts(), facts())] == [
        "worker w0: python is not there",
        "worker w0: lockstep is not there",
    ]


def transport(count):
    return types.SimpleNamespace(workers=[Worker(name=f"w{index}") for index in range(count)])


def preparation(**changes):
    given = {"roots": ["~/w"], "setup": None, "setup_files": {}, "setup_logs": [], "archive": None, "program": "x"}
    more = {"cwds": ["~"], "environment": {}, "unreachable_s": 1.0, "preflight": True, "sudo": False, "replaces": True}
    return Preparation(**{**given, **more, **changes})


@pytest.fixture
def answers(monkeypatch):
    """The facts that a worker will answer, one after the other; the last stays."""
    busy = []

    def call(transport, worker, request, payload=(), on_output=None):
        if request["op"] == "clear":
            return {"running": []}
        ports = busy.pop(0) if len(busy) > 1 else busy[0]
        facts = {
            "holders": [],
            "busy_ports": ports,
            "closed": [],
            "disk": {},
            "program": "/x",
            "versions": {},
            "path": "",
        }
        return {**facts, "small_pages": worker == 1, "time": time.time()}

    monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(module, "PAUSE_S", (0.01, 0.01))
    return busy


def test_a_job_that_is_started_again_waits_for_what_it_has_used_itself(answers, capsys):
    answers[:] = [[8476], [8476], []]
    assert prepare(transport(1), preparation(), Console()) == [pytest.approx(0.0, abs=0.1)]
    assert capsys.readouterr().err.count("waiting for chips and ports to be free again") == 1


def test_what_a_job_survives_is_said_and_no_reason_to_start_nothing(answers, capsys):
    answers[:] = [[]]
    job = preparation(environment={"JAX_COMPILATION_CACHE_DIR": "/tmp/cache"}, roots=["~/w"] * 3, cwds=["~"] * 3)
    assert len(prepare(transport(3), job, Console())) == 3
    told = capsys.readouterr().err
    assert "transparent huge pages are off on 1 worker(s), w1 first" in told and "echo always > /sys/kernel" in told
    assert "JAX_COMPILATION_CACHE_DIR is /tmp/cache. Unless all workers share it" in told
    prepare(transport(1), preparation(environment={"JAX_COMPILATION_CACHE_DIR": "/tmp/cache"}), Console())
    shared = {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}
    prepare(transport(3), preparation(environment=shared, roots=["~/w"] * 3, cwds=["~"] * 3), Console())
    assert "COMPILATION" not in capsys.readouterr().err


@pytest.mark.parametrize("replaces", [False, True])
def test_what_stays_in_use_is_an_error(answers, monkeypatch, replaces):
    answers[:] = [[8476]]
    monkeypatch.setattr(module, "FREE_S", 0.1)
    with pytest.raises(LaunchError, match="port 8476 is in use") as error:
        prepare(transport(1), preparation(replaces=replaces), Console())
    assert error.value.code == PREFLIGHT


def test_what_is_done_on_all_is_done_side_by_side_and_all_errors_are_told():
    gate = threading.Barrier(3, timeout=5)
    assert on_all(transport(3), lambda index: (gate.wait() >= 0, index)) == [(True, 0), (True, 1), (True, 2)]

    def fail(index):
        if index != 1:
            raise LaunchError(f"worker {index} is broken", SETUP_FAILED)

    with pytest.raises(LaunchError, match=r"(?s)^worker 0 is broken\nworker 2 is broken\n.*and 1 more$") as error:
        on_all(transport(10), fail)
    assert error.value.code == SETUP_FAILED
    with pytest.raises(ZeroDivisionError):
        on_all(transport(2), lambda index: 1 / index)
