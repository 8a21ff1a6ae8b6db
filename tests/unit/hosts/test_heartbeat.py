"""Heartbeats: which processes are described as missing, and that posting costs the caller nothing."""

import sys
from types import SimpleNamespace

import pytest

from lockstep.hosts import MemoryClient
from tests.clock import Clock, until

heartbeat = sys.modules["lockstep.hosts.heartbeat"]


class Counting(MemoryClient):
    sets = 0

    def set(self, key, value):
        self.sets += 1
        super().set(key, value)


def test_a_silent_process_is_missing_and_one_that_does_something_else_is_not(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(heartbeat, "time", clock)
    clients = MemoryClient.hub(3)
    own = [heartbeat.Heartbeat(client) for client in clients]
    for each, phase in zip(own, ("decode", "decode", "reading"), strict=True):
        each.enter(phase)
        each._post(clock.now)
    clock.now += heartbeat.SILENT_S
    peers = heartbeat.heartbeats(clients[0])
    assert heartbeat.describe_missing(peers) == ""
    assert heartbeat.describe_elsewhere(peers, "decode") == " Elsewhere: process 2 (last phase 'reading' 2 s ago)."
    for each in (own[0], own[2]):
        each._post(clock.now)
    clock.now += 0.75
    missing = " Missing: process 1 (last phase 'decode' 2 s ago, no sign of life for 2 s)."
    assert heartbeat.wait_for_missing(clients[0]) == missing
    assert "process 1" not in heartbeat.describe_elsewhere(heartbeat.heartbeats(clients[0]), "reading")


def test_the_process_that_is_silent_longest_is_named_first(monkeypatch):
    """On a busy machine the heartbeat of a process that lives may be late too."""
    clock = Clock(1000.0)
    monkeypatch.setattr(heartbeat, "time", clock)
    clients = MemoryClient.hub(3)
    for process in (2, 0, 1):
        heartbeat.Heartbeat(clients[process])._post(clock.now)
        clock.now += 1.0
    assert heartbeat.longest_silent(heartbeat.heartbeats(clients[0])) == [2, 0]
    assert heartbeat.describe_missing(heartbeat.heartbeats(clients[0])).startswith(" Missing: process 2 (")


def test_missing_processes_are_waited_for_as_long_as_a_heartbeat_can_be_late(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(heartbeat, "time", clock)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        clock.now += 0.5

    monkeypatch.setattr(clock, "sleep", sleep)
    (client,) = MemoryClient.hub(1)
    assert heartbeat.wait_for_missing(client) == ""
    assert slept == [heartbeat.MIN_INTERVAL_S] * int((heartbeat.INTERVAL_S + heartbeat.SILENT_S) / 0.5)


def test_a_thread_posts_the_latest_of_many_phases(monkeypatch):
    monkeypatch.setattr(heartbeat, "MIN_INTERVAL_S", 0.5)
    (client,) = Counting.hub(1)
    own = heartbeat.Heartbeat(client)
    own.enter("first")
    assert client.sets == 1 and heartbeat.heartbeats(client)[0].alive_s is None
    stop = own.start_heartbeat()
    for number in range(1000):
        own.enter(f"phase {number}")
    own.wait_at("key")
    until(lambda: heartbeat.heartbeats(client)[0].waits == ("key",))
    assert heartbeat.heartbeats(client)[0].phase == "phase 999" and client.sets < 100
    stop()
    own.enter("after")
    assert heartbeat.heartbeats(client)[0].phase == "after"


def test_a_thread_posts_that_the_process_lives_where_nothing_changes(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.0)
    monkeypatch.setattr(heartbeat, "MIN_INTERVAL_S", 0.001)
    (client,) = Counting.hub(1)
    stop = heartbeat.Heartbeat(client).start_heartbeat()
    until(lambda: client.sets >= 3)
    stop()
    assert heartbeat.heartbeats(client)[0].phase == "started"


def test_nothing_is_posted_while_processes_meet(monkeypatch):
    """A wait most often ends at once, and a post beside it would delay the barrier of all."""
    monkeypatch.setattr(heartbeat, "MIN_INTERVAL_S", 60.0)
    (client,) = Counting.hub(1)
    own = heartbeat.Heartbeat(client)
    stop = own.start_heartbeat()
    own.wait_at("between launches")
    assert client.sets == 0
    stop()  # the thread makes the last post, and ends
    assert client.sets == 1
    assert heartbeat.heartbeats(client)[0].waits == ("between launches",)


@pytest.mark.parametrize(("count", "looks"), [(2, 41), (64, 21), (1024, 3)])
def test_the_more_processes_the_less_often_each_looks_for_one_that_is_silent(monkeypatch, count, looks):
    now, read = [0.0], []

    def sleep(seconds):
        now[0] = round(now[0] + seconds, 6)

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    client = SimpleNamespace(count=count, get_dir=lambda prefix: read.append(prefix) or {})
    assert heartbeat.wait_for_missing(client) == "" and len(read) == looks


def test_a_process_that_stays_silent_is_printed_once_until_it_is_heard_again(capsys):
    silent = heartbeat.SilentProcesses()
    silent.hear(["process 3 (2 s)"], 3600.0)
    assert silent.names == ("process 3 (2 s)",) and capsys.readouterr().err == ""
    for names in (["process 1 (2 s)"], ["process 1 (7 s)", "process 2 (2 s)"], [], ["process 1 (3 s)"]):
        silent.hear(names, 0.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": it is stopped")[0] for line in lines] == [
        f"lockstep: nothing is heard of process {process}" for process in ("1 (2 s)", "2 (2 s)", "1 (3 s)")
    ]
