"""Host logic between threads with the in-memory client: the bodies that tests/multiprocess runs between processes."""

from types import SimpleNamespace

import pytest

from lockstep.errors import HostError, PeerError
from lockstep.hosts import Hosts, MemoryClient, _client, current, digest, on_one_machine
from lockstep.hosts import channel as channel_module
from tests.multiprocess.harness import run_threads
from tests.multiprocess.host_bodies import BEHAVIOURS

WAIT_S = 0.2


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_between_threads(behaviour, count):
    body, check = BEHAVIOURS[behaviour]
    check(run_threads(body, count, WAIT_S), WAIT_S)


def test_one_process_waits_for_nobody():
    hosts = Hosts(*MemoryClient.hub(1), timeout_s=1.0)
    with hosts.scope("round") as scope:
        scope.phase("alone")
        scope.barrier("start")
        assert scope.broadcast("prompts", b"p") == b"p"
        assert scope.gather("rows", b"r") == [b"r"]
        scope.agree("programs", {"decode": "d"})
        with scope.run_on_all("fine"):
            pass
        with pytest.raises(PeerError, match="^round#1/prepare failed: ValueError: no prompts$"):
            with scope.run_on_all("prepare"):
                raise ValueError("no prompts")
        scope.barrier("end")
    assert hosts.client.get_dir("lockstep/job") == {}
    assert hosts.is_leader and current().count == 1 and current() is current()


def _large(hosts, value):
    with hosts.scope("large") as scope:
        got = scope.broadcast("v", value if hosts.is_leader else None)
        rows = scope.gather("w", value[: len(value) - hosts.index])
        pieces = len(hosts.client.get_dir("lockstep/job"))
        scope.barrier("end")
    hosts.barrier("deleted")
    return got, rows, pieces, hosts.client.get_dir("lockstep/job")


@pytest.mark.parametrize("length", [0, 9, 10, 11, 20, 95])
def test_values_longer_than_one_message(monkeypatch, length):
    monkeypatch.setattr(channel_module, "CHUNK_BYTES", 10)
    value = bytes(range(length))
    results = run_threads(_large, 3, value)
    assert all(got == value and left == {} for got, _, _, left in results)
    assert results[0][1] == [value[: length - i] for i in range(3)] if length else True
    assert length <= 10 or results[0][2] >= 4


def _wrong_broadcast(hosts):
    with pytest.raises(HostError, match=f"process {hosts.index} passed {'None' if hosts.is_leader else '1 bytes'}"):
        hosts.broadcast("v", None if hosts.is_leader else b"x")


def test_only_the_leader_has_something_to_broadcast():
    run_threads(_wrong_broadcast, 2)


def test_long_errors_and_values_are_shortened():
    hosts = Hosts(*MemoryClient.hub(1))
    with pytest.raises(PeerError) as caught, hosts.run_on_all("x"):
        raise ValueError("y" * 10_000)
    assert len(str(caught.value)) < 2200


def test_digest_knows_where_a_part_ends():
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert digest("ab", b"c") == digest(b"ab", "c")
    assert len(digest()) == 64


def _from_leader(hosts, fail):
    def work():
        assert hosts.is_leader
        if fail:
            raise OSError("no such file")
        return b"prompts"

    try:
        return hosts.broadcast_from_leader("prompts", work).decode()
    except PeerError as error:
        return f"{error} ({type(error.__cause__).__name__})"


def test_what_the_leader_does_fails_alike_everywhere():
    assert run_threads(_from_leader, 3, False) == ["prompts"] * 3
    text = "1 of 3 processes failed at 'prompts'. process 0: OSError: no such file"
    assert run_threads(_from_leader, 3, True) == [f"{text} (OSError)", f"{text} (NoneType)", f"{text} (NoneType)"]


def _phase(hosts, errors, agreed, launches=None):
    """A phase in which each process may fail, and gives what it shares and what must agree."""
    for name in () if launches is None else launches[hosts.index]:
        hosts.ledger.record(name, f"digest of {name}")
    run = hosts.run_on_all if launches is None else hosts.launch_on_all
    try:
        with run("prepare") as phase:
            phase.agree({"programs": agreed[hosts.index]})
            phase.share({"free": hosts.index})
            if errors[hosts.index]:
                raise ValueError(errors[hosts.index])
    except HostError as error:
        return type(error).__name__, str(error), repr(error.__cause__), error.on_every_process
    return phase.shared


def test_a_phase_gives_every_process_what_all_share():
    assert run_threads(_phase, 3, [None] * 3, ["d"] * 3) == [[{"free": 0}, {"free": 1}, {"free": 2}]] * 3


def test_the_same_error_of_several_processes_is_named_once():
    errors = ["no prompts", "no prompts", "no prompts", None, "disk full", "no prompts"]
    results = run_threads(_phase, 6, errors, ["d"] * 6)
    text = "5 of 6 processes failed at 'prepare'. processes 0-2, 5: ValueError: no prompts; process 4: ValueError: disk"
    assert {(kind, message.startswith(text), everywhere) for kind, message, _, everywhere in results} == {
        ("PeerError", True, True)
    }
    assert [cause for *_, cause, _ in results][3:5] == ["None", "ValueError('disk full')"]


def test_values_that_differ_are_an_error_on_every_process():
    results = run_threads(_phase, 3, [None] * 3, ["a", "b", "b"])
    assert len(set(results)) == 1
    kind, text, _, everywhere = results[0]
    assert kind == "DisagreementError" and everywhere
    assert "disagree at 'prepare' on 'programs'. programs: processes 1, 2 (the majority): 'b'; process 0: 'a'" in text


def test_a_failure_comes_before_a_difference():
    results = run_threads(_phase, 2, ["no prompts", None], ["a", "b"])
    assert [kind for kind, *_ in results] == ["PeerError"] * 2


def test_a_phase_that_launches_compares_the_launches():
    results = run_threads(_phase, 3, [None] * 3, ["d"] * 3, ["rp", "rp", "rd"])
    assert len(set(results)) == 1
    kind, text, _, everywhere = results[0]
    assert kind == "LaunchMismatchError" and everywhere
    assert "Launch 1 was 'p' (digest of p) on processes 0, 1; 'd' (digest of d) on process 2." in text
    assert run_threads(_phase, 2, [None] * 2, ["d"] * 2, ["rp", "rp"]) == [[{"free": 0}, {"free": 1}]] * 2


def _waits(hosts):
    before = len(hosts._channel.heartbeat._waits)
    with hosts.launch_on_all("generate") as phase:
        phase.agree({"tokens": "t"})
        phase.share(1)
    return len(hosts._channel.heartbeat._waits) - before


def test_a_phase_waits_once():
    assert run_threads(_waits, 2) == [1, 1]


@pytest.mark.parametrize(
    ("address", "count", "one"),
    [
        (None, 1, True),
        ("127.0.0.1:1234", 2, True),
        ("localhost:1234", 2, True),
        ("[::1]:1234", 2, True),
        ("10.0.0.2:1234", 1, True),
        ("10.0.0.2:1234", 2, False),
        ("pod-worker-0:1234", 2, False),
    ],
)
def test_processes_that_meet_at_a_loopback_address_are_on_one_machine(
    address: str | None, count: int, one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(client=address and object(), coordinator_address=address, num_processes=count)
    monkeypatch.setattr(_client, "global_state", state)
    assert on_one_machine() == one
