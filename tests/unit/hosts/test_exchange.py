"""What processes exchange."""

import pytest

from lockstep.errors import HostError, PeerError
from lockstep.hosts import Hosts, MemoryClient, digest
from tests.multiprocess.harness import run_threads


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
