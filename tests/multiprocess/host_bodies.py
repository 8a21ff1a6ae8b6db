"""What tests/unit/hosts runs between threads and tests/multiprocess/test_hosts.py between processes: the same logic.

Each behaviour is a body, which returns plain values, and a check, which says what they must be. Bodies leave no key.
"""

import collections
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from lockstep.errors import DisagreementError, HostError, HostTimeoutError, PeerError
from lockstep.hosts import Hosts


def caught(function: Callable[[], object]) -> list[Any]:
    """The error of a call as [type, text, type of its cause]; [] when there is none."""
    try:
        function()
    except HostError as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    return []


Results = list[Any]
"""What each process returned, by process number."""


def clean(hosts: Hosts) -> None:
    """Delete the keys of waits that ran out of time, which nobody else does."""
    hosts.barrier("left")
    if hosts.is_leader:
        hosts.client.delete("lockstep/job")


def barrier(hosts: Hosts, wait_s: float) -> tuple[float, float]:
    """When this process came to a barrier, and when it left it: the last one comes late."""
    with hosts.scope("barrier") as scope:
        if hosts.index == hosts.count - 1:
            time.sleep(wait_s)
        came = time.monotonic()
        scope.barrier("all")
    return came, time.monotonic()


def check_barrier(results: Results, wait_s: float) -> None:
    assert min(left for _, left in results) >= max(came for came, _ in results)


def broadcast(hosts: Hosts, wait_s: float) -> list[int]:
    values = [b"", b"prompts", bytes(1000) + b"end"]
    with hosts.scope("broadcast") as scope:
        got = [scope.broadcast(f"v{i}", v if hosts.is_leader else None) for i, v in enumerate(values)]
        scope.barrier("end")
    return [len(value) for value in got] if got == values else []


def check_broadcast(results: Results, wait_s: float) -> None:
    assert results == [[0, 7, 1003]] * len(results)


def gather(hosts: Hosts, wait_s: float) -> list[str] | None:
    with hosts.scope("gather") as scope:
        got = scope.gather("rows", f"from {hosts.index}".encode())
        scope.barrier("end")
    return None if got is None else [value.decode() for value in got]


def check_gather(results: Results, wait_s: float) -> None:
    count = len(results)
    assert results == [[f"from {i}" for i in range(count)], *[None] * (count - 1)]


def agree(hosts: Hosts, wait_s: float) -> list[Any]:
    last = hosts.index == hosts.count - 1
    with hosts.scope("agree") as scope:
        scope.agree("same", {"step": "10", "config": "aaaa"})
        odd = caught(lambda: scope.agree("odd", {"step": "10", "config": "bbbb" if last else "aaaa"}))
        absent = caught(lambda: scope.agree("absent", {"step": "10"} if last else {"step": "10", "programs": "cc"}))
        each = caught(lambda: scope.agree("each", {"prompts": f"p{hosts.index}"}))
    return [odd, absent, each]


def check_agree(results: Results, wait_s: float) -> None:
    last = len(results) - 1
    first = list(range(last))
    assert all(one == results[0] for one in results), "the text is the same on every process"
    odd, absent, each = results[0]
    assert odd[0] == absent[0] == each[0] == DisagreementError.__name__
    others = {1: "process 0", 3: "processes 0-2"}[len(first)]
    majority = " (the majority)" if len(first) > 1 else ""
    assert f"config: {others}{majority}: 'aaaa'; process {last}: 'bbbb'." in odd[1]
    assert "on 'config'." in odd[1] and "step:" not in odd[1]
    assert f"programs: {others}{majority}: 'cc'; process {last}: no such value." in absent[1]
    assert "; ".join(f"process {i}: 'p{i}'" for i in [*first, last]) in each[1] and "majority" not in each[1]


def fail(scope: Hosts, name: str, error: Exception | None) -> None:
    with scope.run_on_all(name):
        if error is not None:
            raise error


def failures(hosts: Hosts, wait_s: float) -> list[Any]:
    last = hosts.index == hosts.count - 1
    with hosts.scope("failures") as scope:
        fail(scope, "fine", None)
        one = caught(lambda: fail(scope, "one", ValueError("prompts.txt is empty") if last else None))
        every = caught(lambda: fail(scope, "every", OSError(f"disk {hosts.index}")))
    return [one, every]


def check_failures(results: Results, wait_s: float) -> None:
    count = len(results)
    assert len({text for _, (_, text, _) in results}) == 1, "the text is the same on every process"
    disks = "; ".join(f"process {i}: OSError: disk {i}" for i in range(count))
    for one, every in results:
        assert one[0] == every[0] == PeerError.__name__
        place = r"processes failed at 'failures#\d+"
        who = f"process {count - 1}: ValueError: prompts.txt is empty"
        assert re.fullmatch(rf"1 of {count} {place}/one'\. {who}", one[1]), one[1]
        assert re.fullmatch(rf"{count} of {count} {place}/every'\. {disks}", every[1]), every[1]
    assert [one[2] for one, _ in results] == ["NoneType"] * (count - 1) + ["ValueError"], "an own error is the cause"
    assert [every[2] for _, every in results] == ["OSError"] * count


def names(hosts: Hosts, wait_s: float) -> list[Any]:
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


def check_names(results: Results, wait_s: float) -> None:
    for again, deep in results:
        assert again[0] == deep[0] == HostError.__name__
        (count,) = re.findall(r"'same' is used twice inside the scope 'lockstep/job/repeated#(\d+)'", again[1])
        assert int(count) >= 2, "a scope of a name that was used before has another number"
        assert re.search(r"'lockstep/job/outer#\d+/inner#1'", deep[1]), deep[1]


def keys(hosts: Hosts, wait_s: float) -> list[int]:
    """Keys after a scope that ended with a barrier, after one that ended without, and after one that failed."""
    counts = []

    def count(name: str) -> None:
        hosts.barrier(f"ended {name}")  # the leader may still be deleting when the others leave the scope
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


def check_keys(results: Results, wait_s: float) -> None:
    assert results == [[0, 0, 0, 0]] * len(results)


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
    clean(hosts)
    return found


def check_late(results: Results, wait_s: float) -> None:
    last = len(results) - 1
    for index, (barrier, gather, agree, broadcast) in enumerate(results):
        for i, found in enumerate((barrier, gather, agree)):
            if index == last:
                assert found == []
                continue
            assert found[0] == HostTimeoutError.__name__
            waited = rf"barrier 'lockstep/job/round#\d+/tokens' timed out after {wait_s:g} s on process {index}"
            assert re.search(waited, found[1]), found[1]
            assert f"Missing: process {last} (last phase 'decode {i}' " in found[1]
            assert "process 0 (" not in found[1]
        if index > 0:
            assert broadcast[0] == HostTimeoutError.__name__
            assert "Missing: process 0 (last phase 'reading prompts' " in broadcast[1]


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
    clean(hosts)
    return found


def check_left_by_error(results: Results, wait_s: float) -> None:
    last = len(results) - 1
    for found in results[:-1]:
        assert f"process {last} (last phase 'tokenize (left by ValueError: no such file)' " in found[1]


def stopping(hosts: Hosts, wait_s: float) -> list[Any]:
    """What a process learns at a place that all come to again and again: reasons to stop, or an error."""
    last, everyone = {hosts.count - 1}, set(range(hosts.count))
    steps: list[tuple[set[int], set[int], set[int]]] = [
        # who has an error, who has a reason, who comes late
        (set(), set(), last),
        (set(), last, last),
        (set(), {0}, everyone - {0}),
        (set(), set(), {0}),
        (last, set(), last),
        (last, set(), everyone - last),
        (everyone, everyone, set()),
        ({0}, last, set()),
        (set(), set(), set()),
    ]
    found = []
    with hosts.scope("stopping") as scope:
        for errors, reasons, late in steps:
            error = ValueError(f"no text {hosts.index}") if hosts.index in errors else None
            reason = f"reason {hosts.index}" if hosts.index in reasons else None
            time.sleep(wait_s / 4 if hosts.index in late else 0)
            learned = set[str]()
            failed = caught(lambda e=error, r=reason, learned=learned: learned.update(scope.reasons_to_stop("x", e, r)))
            found.append(failed or sorted(learned))
        scope.barrier("end")
    return found


def check_stopping(results: Results, wait_s: float) -> None:
    last = len(results) - 1
    for index, found in enumerate(results):
        assert found[:4] == [[], [f"reason {last}"], ["reason 0"], []] and found[8] == []
        for failed, who in zip(found[4:8], ({last}, {last}, set(range(last + 1)), {0}), strict=True):
            assert failed[0] == PeerError.__name__ and failed[2] == ("ValueError" if index in who else "NoneType")
            assert [f"process {i}: ValueError: no text {i}" in failed[1] for i in range(last + 1)] == [
                i in who for i in range(last + 1)
            ]


class CountedClient:
    """The client of a channel, with a count of what it is asked for."""

    def __init__(self, client: Any):
        self.client = client
        self.requests: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.client, name)
        if callable(value):
            self.requests[name] += 1
        return value


def requests(hosts: Hosts, wait_s: float) -> dict[str, Any]:
    """For each call what it asked the service for, and the median of its milliseconds."""
    calls: dict[str, Callable[[Hosts], object]] = {
        "barrier": lambda scope: scope.barrier("x"),
        "broadcast": lambda scope: scope.broadcast("x", bytes(1000) if hosts.is_leader else None),
        "gather": lambda scope: scope.gather("x", bytes(1000)),
        "agree": lambda scope: scope.agree("x", {"tokens": "0" * 64, "ledger": "1" * 64}),
        "phase": lambda scope: fail(scope, "x", None),
        "gate": lambda scope: scope.reasons_to_stop("x", None),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        laps = []
        for _ in range(10):
            hosts.barrier("ready")
            counted = CountedClient(hosts.client)
            with hosts.scope(name) as scope, mock.patch.object(hosts._channel, "client", counted):
                start = time.perf_counter()
                call(scope)
                laps.append(1000 * (time.perf_counter() - start))
        found[name] = {
            "requests": dict(counted.requests),
            "ms": round(sorted(laps)[len(laps) // 2], 2),
            "runs_service": hosts.client.task == 0,
        }
    hosts.barrier("all")
    return found


def check_requests(results: Results, wait_s: float) -> None:
    """A call is a post and one wait, which the service answers at once; nobody asks again and again."""
    print(f"{len(results)} processes, median ms: { {name: one['ms'] for name, one in results[0].items()} }")
    for index, result in enumerate(results):
        asked = {name: one["requests"] for name, one in result.items()}
        assert asked["barrier"] == asked["gate"] == {"barrier": 1}
        for name in ("agree", "phase"):
            # The process with the service reads what all have posted, and posts what it makes of it.
            rest = {"set": 2, "get_dir": 1} if result[name]["runs_service"] else {"set": 1, "get": 1}
            assert asked[name] == {"barrier": 1} | rest, (name, asked[name])
        assert asked["broadcast"] == ({"set": 1} if index == 0 else {"get": 1})
        leaders = {"get": len(results)} if index == 0 else {}
        assert asked["gather"] == {"set": 1, "barrier": 1} | leaders


LATE = "who is late is named with its phase"

BEHAVIOURS: dict[str, tuple[Callable[[Hosts, float], Any], Callable[[Results, float], None]]] = {
    "a barrier lets nobody pass before all have come": (barrier, check_barrier),
    "a broadcast gives everybody the leader's bytes": (broadcast, check_broadcast),
    "a gather gives the leader everybody's bytes": (gather, check_gather),
    "who disagrees is named to everybody": (agree, check_agree),
    "errors of some are raised on all": (failures, check_failures),
    "a name is used once in a scope": (names, check_names),
    "no key stays": (keys, check_keys),
    LATE: (late, check_late),
    "who left by an error is named with it": (left_by_error, check_left_by_error),
    "a call is one wait": (requests, check_requests),
    "reasons to stop are known to all": (stopping, check_stopping),
}
"""By name: what every process runs, given how long the waits last that end in a time-out, and its check."""
