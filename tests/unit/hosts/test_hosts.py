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
        scope.settle("fine", None)
        with pytest.raises(PeerError, match="1 of 1 processes failed .* process 0: ValueError: no prompts"):
            scope.settle("prepare", ValueError("no prompts"))
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
    with pytest.raises(PeerError) as caught:
        hosts.settle("x", ValueError("y" * 10_000))
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
    text = "1 of 3 processes failed at 'lockstep/job/prompts#1'. process 0: OSError: no such file"
    assert run_threads(_from_leader, 3, True) == [f"{text} (OSError)", f"{text} (NoneType)", f"{text} (NoneType)"]


def _logged_sizing(hosts):
    return hosts.settle("measure", None, {"free": hosts.index})


def test_settling_tells_what_every_process_has_to_tell():
    assert run_threads(_logged_sizing, 3) == [[{"free": 0}, {"free": 1}, {"free": 2}]] * 3


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
