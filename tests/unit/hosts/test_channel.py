"""Values that are posted and read, and keys that are left."""

import pytest

from lockstep.errors import HostTimeoutError
from lockstep.hosts import MemoryClient
from lockstep.hosts import channel as channel_module
from tests.multiprocess.harness import run_threads


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


def test_a_short_value_is_one_key_and_a_long_one_has_pieces(monkeypatch):
    monkeypatch.setattr(channel_module, "CHUNK_BYTES", 10)
    (client,) = MemoryClient.hub(1)
    channel = channel_module.Channel(client)
    channel.post("short", b"0123456789")
    channel.post("long", b"0123456789abc")
    assert sorted([*client.get_dir("short"), *client.get_dir("long")]) == ["long/0", "long/0/0", "short/0"]
    assert channel.read("long", 0, 1.0) == b"0123456789abc"


def test_the_leader_deletes_keys_after_the_next_barrier_and_no_sooner():
    (client,) = MemoryClient.hub(1)
    channel = channel_module.Channel(client)
    channel.post("old", b"x")
    channel.delete_after_barrier("old")
    assert client.get_dir("old")
    channel.barrier("next", 1.0)
    assert not client.get_dir("old")


def test_a_value_that_never_comes_names_the_process_that_did_not_send_it():
    client, _ = MemoryClient.hub(2)
    with pytest.raises(HostTimeoutError, match=r"read 'v' timed out after 0\.01 s .* Missing: process 1 .never seen"):
        channel_module.Channel(client).read("v", 1, 0.01)


def test_everybody_gets_everybodys_value_in_order():
    def body(hosts):
        return hosts._channel.exchange("e", [hosts.index], 5.0, list)

    assert run_threads(body, 3) == [[[0], [1], [2]]] * 3
