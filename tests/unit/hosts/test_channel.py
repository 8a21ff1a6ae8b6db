"""Values that are posted and read, and keys that are left."""

import json
import re
import sys
from typing import Any

import pytest

from lockstep.errors import HostError, HostTimeoutError
from lockstep.hosts import MemoryClient, heartbeat
from lockstep.hosts import channel as channel_module
from lockstep.hosts.channel import columns, read_columns, spread
from tests.clock import Clock
from tests.multiprocess.harness import run_threads


def _large(hosts, value):
    with hosts.scope("large") as scope:
        got = scope.broadcast("v", value if hosts.is_leader else None)
        rows = scope.gather("w", value[: len(value) - hosts.index])
        pieces = len(hosts.client.get_dir("lockstep/job"))
        scope.all_min("least", 1)
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
        return hosts._channel.exchange(
            "e", [hosts.index], 5.0, list, list
        )  # all values in order are what is made of them

    assert run_threads(body, 3) == [[[0], [1], [2]]] * 3


@pytest.mark.parametrize("value", [b"", b"{", b"[" * 100_000, b'{"a": "b"}', b"7"], ids=range(5))
def test_what_is_no_value_of_an_exchange_is_the_same_error_on_every_process(value):
    """Also where it was not this process that read it."""

    def body(hosts):
        if hosts.index == 1:
            real = hosts.client.set
            hosts.client.set = lambda key, text: real(key, value if key.endswith("/1") else text)
        with pytest.raises(HostError) as caught:
            hosts.all_min("free", 3) if value != b"7" else hosts.agree("free", {"a": "b"})
        return str(caught.value)

    (text,) = set(run_threads(body, 3))
    assert text.startswith("what process 1 has posted at 'lockstep/job/free#1' is not of this exchange. Look for")


def test_a_process_that_does_not_say_what_all_have_posted_is_named_after_the_deadline():
    def body(hosts):
        hosts.timeout_s = 0.05
        if hosts.index == 0:
            real = hosts.client.set
            hosts.client.set = lambda key, text: None if key.endswith("/all") else real(key, text)
        try:
            hosts.agree("settings", {"a": "b"})
        except HostTimeoutError as error:
            return str(error)

    leader, other = run_threads(body, 2)
    assert leader is None
    assert other.startswith("read 'lockstep/job/settings#1' timed out after 0.05 s") and "Missing: process 0" in other


def test_one_process_reads_who_is_late_for_all():
    """Each would move what all others have posted: 150 MB at 1,024 processes."""

    def body(hosts):
        reads, get_dir = [], hosts.client.get_dir
        hosts.client.get_dir = lambda prefix: (reads.append(prefix), get_dir(prefix))[1]
        if hosts.index == 5:
            hosts.phase("reading rows")
        hosts.barrier("all are here")
        if hosts.index == 5:
            return None
        hosts.timeout_s = 0.5
        with pytest.raises(HostTimeoutError) as caught:
            hosts.barrier("save")
        return reads, str(caught.value)

    texts = []
    for index, found in enumerate(run_threads(body, 6)):
        if found is not None:
            assert found[0] == [heartbeat.DIRECTORY] * (index == 0)
            texts.append(found[1].replace(f"on process {index} of 6", ""))
    assert len(texts) == 5 and len(set(texts)) == 1 and "Missing: process 5 (last phase 'reading rows'" in texts[0]


def test_who_lives_and_is_elsewhere_is_named_beside_who_is_silent(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(sys.modules["lockstep.hosts.heartbeat"], "time", clock)
    clients = MemoryClient.hub(3)
    own = [heartbeat.Heartbeat(client) for client in clients]
    own[1]._post(clock.now)
    clock.now += 60.0
    own[2].wait_at("another place")
    own[2]._post(clock.now)
    with pytest.raises(HostTimeoutError) as caught:
        channel_module.Channel(clients[0]).barrier("save", 0.01)
    text = str(caught.value)
    assert re.search(r"Missing: process 1 \(.*, no sign of life for 60 s\)\. Alive, but not here: process 2 \(", text)
    assert "Their last wait: process 2 waits at 'another place'." in text


def test_without_the_process_that_reads_for_all_each_names_it():
    def body(hosts):
        hosts.timeout_s = 0.05
        if hosts.index:
            with pytest.raises(HostTimeoutError, match="Missing: process 0 .never seen"):
                hosts.barrier("save")

    run_threads(body, 3)


def test_bytes_of_an_exchange_do_not_grow_with_the_square_of_processes():
    """2.3 KB to agree on, and a value of each process's own: one process reads all, the others what is made of them."""
    agreed = {f"value {number}": "x" * 64 for number in range(28)}

    def body(hosts):
        moved = {"set": 0, "get": 0}
        post, read = hosts.client.set, hosts.client.get
        hosts.client.set = lambda key, text: (post(key, text), moved.update(set=moved["set"] + len(text)))[0]

        def get(key, timeout_s):
            text = read(key, timeout_s)
            moved["get"] += len(text)
            return text

        hosts.client.get = get
        hosts.client.get_dir = hosts.client.get_dir if hosts.is_leader else None
        with hosts.run_on_all("prepare") as phase:
            phase.agree(agreed)
            phase.share(hosts.index)
        assert phase.shared == list(range(32))
        return moved

    _, *others = run_threads(body, 32)
    assert max(moved["set"] for moved in others) < 200
    assert max(moved["get"] for moved in others) < 200 + 32 * 10


@pytest.mark.parametrize(
    "values",
    [
        [0, 1, 2],
        [7, 7, 7],
        [2**40, -1, 0],
        [2**63, 1, 2],
        [1, True, 0],
        [1, 1.0, False],
        [None, "i", 3],
        [[1], [2], [3]],
    ],
)
def test_columns_travel_as_they_are(values):
    """Integers of each process's own as one text; 1, 1.0 and True stay what they are."""
    rows = [[value, "same"] for value in values]
    sent = json.loads(json.dumps(columns(rows)))
    own, same = read_columns(sent, [Any, Any], 3)
    assert list(map(repr, spread(own, 3))) == list(map(repr, values)) and spread(same, 3) == ["same"] * 3
    assert (type(sent[0][0]) is str) == (values in ([0, 1, 2], [2**40, -1, 0]))


@pytest.mark.parametrize("text", ["i", "iAAAAAAAAAAA=", "iAAAA", "i!", "d" + "A" * 32, "", "q" + "A" * 64])
def test_a_text_that_is_no_column_is_refused(text):
    with pytest.raises((ValueError, TypeError)):
        read_columns([[text, None]], [Any], 3)
