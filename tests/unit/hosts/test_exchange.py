"""What processes exchange."""

import pytest

from lockstep.errors import DisagreementError, HostError, PeerError
from lockstep.hosts import Hosts, MemoryClient, digest
from lockstep.hosts.exchange import name_processes, shown, who_has_what
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


def test_what_the_leader_does_fails_everywhere():
    assert run_threads(_from_leader, 3, False) == ["prompts"] * 3
    text = "1 of 3 processes failed at 'prompts'. process 0: OSError: no such file"
    assert run_threads(_from_leader, 3, True) == [f"{text} (OSError)", f"{text} (NoneType)", f"{text} (NoneType)"]


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        ([3], "process 3"),
        ([1, 0], "processes 0, 1"),
        ([2, 0, 1, 5], "processes 0-2, 5"),
        ([0, 2], "processes 0, 2"),
        ([0, 1, 3, 4, 5, 7, 8], "processes 0, 1, 3-5, 7, 8"),
    ],
)
def test_processes_in_a_row_are_named_by_the_first_and_the_last(processes, text):
    assert name_processes(processes) == text


def test_long_values_are_shortened():
    assert who_has_what(["a" * 200, "b"]) == f"process 0: '{'a' * 77}...'; process 1: 'b'"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("lockstep/job/inference_eval#3/prepare", "inference_eval#3/prepare"),
        ("lockstep/job/config#1", "config"),
        ("lockstep/launch/7", "lockstep/launch/7"),
    ],
)
def test_a_key_is_shown_without_what_all_keys_have(key, text):
    assert shown(key) == text


def test_the_smallest_number_of_all_is_everybodys():
    assert run_threads(lambda hosts: hosts.all_min("free", 10 - hosts.index), 3) == [8, 8, 8]


def test_values_that_differ_are_told_apart_in_their_first_characters():
    def body(hosts):
        with pytest.raises(DisagreementError) as caught:
            hosts.agree("x", {"same": "s", "config": "b" if hosts.index else "a" * 200})
        return str(caught.value)

    (text,) = set(run_threads(body, 3))
    assert "disagree at 'x' on 'config'. config: processes 1, 2 (the majority): 'b'; " in text
    assert f"process 0: '{'a' * 77}...'. Every process" in text


def test_an_error_shows_some_of_many_different_values():
    def body(hosts):
        with pytest.raises(DisagreementError) as caught:
            hosts.agree("x", {"seed": str(hosts.index)})
        return str(caught.value)

    (text,) = set(run_threads(body, 20))
    assert "process 15: '15'; 4 more values." in text
