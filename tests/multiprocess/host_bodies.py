"""What tests/unit/hosts runs between threads and tests/multiprocess/test_hosts.py between processes: the same logic.

Every body returns plain values; ``check`` says what they must be.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import DisagreementError, HostError, HostTimeoutError, PeerError
from lockstep.hosts import Hosts


def caught(function: Callable[[], object]) -> list[Any]:
    """The error of a call as [type, text, type of its cause]; [] when there is none."""
    try:
        function()
    except HostError as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    return []


def barrier_orders(hosts: Hosts) -> float:
    """Nobody leaves before the slowest has come."""
    with hosts.scope("barrier") as scope:
        if hosts.index == hosts.count - 1:
            time.sleep(0.2)
        before = time.time()
        scope.barrier("all")
    return time.time() - before


def broadcasts(hosts: Hosts) -> list[int]:
    values = [b"", b"prompts", bytes(1000) + b"end"]
    with hosts.scope("broadcast") as scope:
        got = [scope.broadcast(f"v{i}", v if hosts.is_leader else None) for i, v in enumerate(values)]
        scope.barrier("end")
    return [len(value) for value in got] if got == values else []


def gathers(hosts: Hosts) -> list[str] | None:
    with hosts.scope("gather") as scope:
        got = scope.gather("rows", f"from {hosts.index}".encode())
        scope.barrier("end")
    return None if got is None else [value.decode() for value in got]


def agreements(hosts: Hosts) -> list[Any]:
    last = hosts.index == hosts.count - 1
    with hosts.scope("agree") as scope:
        scope.agree("same", {"step": "10", "config": "aaaa"})
        odd = caught(lambda: scope.agree("odd", {"step": "10", "config": "bbbb" if last else "aaaa"}))
        absent = caught(lambda: scope.agree("absent", {"step": "10"} if last else {"step": "10", "programs": "cc"}))
        each = caught(lambda: scope.agree("each", {"prompts": f"p{hosts.index}"}))
    return [odd, absent, each]


def fail(scope: Hosts, name: str, error: Exception | None) -> None:
    with scope.run_on_all(name):
        if error is not None:
            raise error


def settles(hosts: Hosts) -> list[Any]:
    last = hosts.index == hosts.count - 1
    with hosts.scope("settle") as scope:
        fail(scope, "fine", None)
        one = caught(lambda: fail(scope, "one", ValueError("prompts.txt is empty") if last else None))
        every = caught(lambda: fail(scope, "every", OSError(f"disk {hosts.index}")))
    return [one, every]


def names(hosts: Hosts) -> list[Any]:
    """A name is used once in a scope; the scope itself is counted; outside of scopes names are counted too."""
    for _ in range(2):
        with hosts.scope("repeated") as scope:
            scope.barrier("same")
            again = caught(lambda scope=scope: scope.barrier("same"))
    for _ in range(2):
        hosts.barrier("outside")
    with hosts.scope("outer") as outer, outer.scope("inner") as inner:
        inner.barrier("deep")
        deep = caught(lambda: inner.barrier("deep"))
    return [again, deep]


def leaves_nothing(hosts: Hosts) -> list[int]:
    """Keys after a scope that ended with a barrier, after one that ended without, and after one that failed."""
    counts = []

    def count(name: str) -> None:
        hosts.barrier(f"settled {name}")  # the leader may still be deleting when the others leave the scope
        hosts.barrier(f"deleted {name}")
        counts.append(len(hosts.client.get_dir("lockstep/job")))
        hosts.barrier(f"counted {name}")

    with hosts.scope("cleanup") as scope:
        scope.broadcast("a", b"x" if hosts.is_leader else None)
        scope.gather("b", b"y")
        scope.agree("c", {"d": "e"})
        fail(scope, "f", None)
        scope.barrier("end")
    if hosts.is_leader:
        counts.append(len(hosts.client.get_dir("lockstep/job")))
    else:
        counts.append(0)
    count("after a barrier")
    with hosts.scope("cleanup") as scope:
        scope.agree("c", {"d": "e"})
    count("after agree")
    with hosts.scope("cleanup") as scope:
        caught(lambda: fail(scope, "f", ValueError("x")))
    count("after an error")
    return counts


def late(hosts: Hosts, wait_s: float) -> list[Any]:
    """The last process says that it decodes and comes late; the others wait for a barrier, a gather, an agreement."""
    found = []
    for i, wait in enumerate(("barrier", "gather", "agree")):
        hosts.barrier(f"before {wait}")
        with hosts.scope("round", timeout_s=wait_s) as scope:
            if hosts.index == hosts.count - 1:
                hosts.phase(f"decode {i}")
                time.sleep(2 * wait_s)
                found.append([])
            elif wait == "barrier":
                found.append(caught(lambda scope=scope: scope.barrier("tokens")))
            elif wait == "gather":
                found.append(caught(lambda scope=scope: scope.gather("tokens", b"")))
            else:
                found.append(caught(lambda scope=scope: scope.agree("tokens", {})))
    hosts.barrier("before broadcast")
    with hosts.scope("round", timeout_s=wait_s) as scope:
        if hosts.is_leader:
            hosts.phase("reading prompts")
            time.sleep(2 * wait_s)
        found.append([] if hosts.is_leader else caught(lambda: scope.broadcast("prompts", None)))
    return found


def left_by_error(hosts: Hosts, wait_s: float) -> list[Any]:
    """A process that left a scope by an error is shown with that error to those that wait for it."""
    found: list[Any] = []
    hosts.barrier("before")
    last = hosts.index == hosts.count - 1
    try:
        with hosts.scope("leaving", timeout_s=wait_s) as scope:
            hosts.phase("tokenize")
            if last:
                raise ValueError("no such file")
            found = caught(lambda: scope.barrier("x"))
    except ValueError:
        time.sleep(2 * wait_s)
    return found


def milliseconds(hosts: Hosts) -> dict[str, float]:
    """The median time of each call."""
    times = {}
    calls: dict[str, Callable[[Hosts], object]] = {
        "barrier": lambda scope: scope.barrier("x"),
        "broadcast 1 KB": lambda scope: scope.broadcast("x", bytes(1000) if hosts.is_leader else None),
        "gather 1 KB": lambda scope: scope.gather("x", bytes(1000)),
        "agree": lambda scope: scope.agree("x", {"tokens": "0" * 64, "ledger": "1" * 64}),
        "settle": lambda scope: fail(scope, "x", None),
    }
    for name, call in calls.items():
        laps = []
        for _ in range(30):
            with hosts.scope(name) as scope:
                start = time.perf_counter()
                call(scope)
                laps.append(time.perf_counter() - start)
        hosts.barrier(name)
        times[name] = round(1000 * sorted(laps)[len(laps) // 2], 2)
    return times


BODIES = (barrier_orders, broadcasts, gathers, agreements, settles, names, leaves_nothing, milliseconds)
SLOW_BODIES = (late, left_by_error)


def run_all(hosts: Hosts, wait_s: float) -> dict[str, Any]:
    """Every body; ``wait_s`` is how long the waits last that end in a time-out."""
    quick = {body.__name__: body(hosts) for body in BODIES}
    return quick | {body.__name__: body(hosts, wait_s) for body in SLOW_BODIES}


def check(results: list[dict[str, Any]], wait_s: float) -> None:
    """What every process must have seen, by process number."""
    count = len(results)
    last = count - 1
    first = list(range(last))

    def by_process(name: str) -> list[Any]:
        return [result[name] for result in results]

    assert all(waited > 0.15 for waited in by_process("barrier_orders")[:-1])
    assert by_process("broadcasts") == [[0, 7, 1003]] * count
    assert by_process("gathers") == [[f"from {i}" for i in range(count)], *[None] * last]
    _check_agreements(by_process("agreements"), first, last)
    for one, every in by_process("settles"):
        assert one[:2] == [
            PeerError.__name__,
            f"1 of {count} processes failed at 'settle#1/one'. process {last}: ValueError: prompts.txt is empty",
        ]
        disks = "; ".join(f"process {i}: OSError: disk {i}" for i in range(count))
        assert every[:2] == [
            PeerError.__name__,
            f"{count} of {count} processes failed at 'settle#1/every'. {disks}",
        ]
        assert every[2] == "OSError"
    assert [one[2] for one, _ in by_process("settles")] == ["NoneType"] * last + ["ValueError"]
    for again, deep in by_process("names"):
        assert again[0] == deep[0] == HostError.__name__
        assert "'same' is used twice inside the scope 'lockstep/job/repeated#2'" in again[1]
        assert "'lockstep/job/outer#1/inner#1'" in deep[1]
    assert by_process("leaves_nothing") == [[0, 0, 0, 0]] * count
    for index, (barrier, gather, agree, broadcast) in enumerate(by_process("late")):
        for i, found in enumerate((barrier, gather, agree)):
            if index == last:
                assert found == []
                continue
            assert found[0] == HostTimeoutError.__name__
            assert (
                f"barrier 'lockstep/job/round#{i + 1}/tokens' timed out after {wait_s:g} s on process {index}"
                in found[1]
            )
            assert f"Missing: process {last} (last phase 'decode {i}' " in found[1]
            assert "process 0 (" not in found[1]
        if index > 0:
            assert broadcast[0] == HostTimeoutError.__name__
            assert "Missing: process 0 (last phase 'reading prompts' " in broadcast[1]
    for found in by_process("left_by_error")[:-1]:
        assert f"process {last} (last phase 'tokenize (left by ValueError: no such file)' " in found[1]
    print(f"{count} processes, median ms: {by_process('milliseconds')[0]}, pid {os.getpid()}")
    assert all(value < 100 for value in by_process("milliseconds")[0].values())


def _check_agreements(found: list[Any], first: list[int], last: int) -> None:
    assert all(one == found[0] for one in found), "the text is the same on every process"
    odd, absent, each = found[0]
    assert odd[0] == absent[0] == each[0] == DisagreementError.__name__
    others = {1: "process 0", 3: "processes 0-2"}[len(first)]
    majority = " (the majority)" if len(first) > 1 else ""
    assert f"config: {others}{majority}: 'aaaa'; process {last}: 'bbbb'." in odd[1]
    assert "on 'config'." in odd[1] and "step:" not in odd[1]
    assert f"programs: {others}{majority}: 'cc'; process {last}: no such value." in absent[1]
    assert "; ".join(f"process {i}: 'p{i}'" for i in [*first, last]) in each[1] and "majority" not in each[1]
