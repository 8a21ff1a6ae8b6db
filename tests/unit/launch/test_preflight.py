"""What is wrong with workers: which one, what, the limit, the fix."""

from lockstep.launch.preflight import GIB, Facts, Limits, problems
from lockstep.launch.workers import Worker


def facts(skew_s=0.0, **changes):
    answer = {
        "holders": [],
        "busy_ports": [],
        "disk": {"/home/me": 50 * GIB, "/tmp": 9 * GIB},
        "program": "/usr/bin/x",
        "versions": {"python": "3.12.1", "lockstep": "0.1.0"},
        "path": "/usr/bin",
    }
    return Facts(answer={**answer, **changes}, skew_s=skew_s)


def found(*given):
    workers = [Worker(name=f"w{index}") for index in range(len(given))]
    return problems(workers, given, "x", Limits())


def test_fit_workers():
    assert found(facts(), facts(skew_s=-20.0), facts(skew_s=20.0)) == []


def test_each_fault_names_the_worker_the_limit_and_the_fix():
    holder = {"pid": 77, "command": "python train.py", "device": "/dev/accel0"}
    for fact, text in (
        (facts(holders=[holder]), "worker w1: process 77 (python train.py) uses /dev/accel0"),
        (facts(holders=[holder]), "sudo kill 77"),
        (facts(busy_ports=[8476]), "worker w1: port 8476 is in use"),
        (facts(busy_ports=[8476]), "or take another one (ssh: --port; TPU VMs: --env JAX_COORDINATOR_PORT=8474)"),
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
