"""Heartbeats: which processes are described as missing, and that posting costs the caller nothing."""

import re
import sys
import time

from lockstep.hosts import MemoryClient

heartbeat = sys.modules["lockstep.hosts.heartbeat"]


class Counting(MemoryClient):
    sets = 0

    def set(self, key, value):
        self.sets += 1
        super().set(key, value)


def test_a_silent_process_is_missing_and_one_that_does_something_else_is_not(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.3)
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.05)
    clients = MemoryClient.hub(3)
    own = [heartbeat.Heartbeat(client) for client in clients]
    stops = [each.start_heartbeat() for each in own]
    for each, phase in zip(own, ("decode", "decode", "reading"), strict=True):
        each.enter(phase)
    time.sleep(0.2)
    peers = heartbeat.heartbeats(clients[0])
    assert heartbeat.describe_missing(peers) == ""
    assert heartbeat.describe_elsewhere(peers, "decode") == " Elsewhere: process 2 (last phase 'reading' 0 s ago)."
    stops[1]()
    text = heartbeat.wait_for_missing(clients[0])
    assert re.fullmatch(r" Missing: process 1 \(last phase .decode. \d s ago, no sign of life for \d s\)\.", text), text
    assert "process 1" not in heartbeat.describe_elsewhere(heartbeat.heartbeats(clients[0]), "reading")
    for stop in stops:
        stop()


def test_a_thread_posts_the_latest_of_many_phases():
    (client,) = Counting.hub(1)
    own = heartbeat.Heartbeat(client)
    own.enter("first")
    assert client.sets == 1 and heartbeat.heartbeats(client)[0].alive_s is None
    stop = own.start_heartbeat()
    for number in range(1000):
        own.enter(f"phase {number}")
    own.wait_at("key")
    time.sleep(3 * heartbeat.MIN_INTERVAL_S)
    peer = heartbeat.heartbeats(client)[0]
    assert (peer.phase, peer.waits[-1], peer.silent) == ("phase 999", "key", False)
    assert client.sets < 20
    stop()
    own.enter("after")
    assert heartbeat.heartbeats(client)[0].phase == "after"


def test_nothing_is_posted_while_processes_meet(monkeypatch):
    """A wait most often ends at once, and a post beside it would delay the barrier of all."""
    monkeypatch.setattr(heartbeat, "MIN_INTERVAL_S", 0.3)
    (client,) = Counting.hub(1)
    own = heartbeat.Heartbeat(client)
    stop = own.start_heartbeat()
    time.sleep(0.05)  # the thread waits for a change
    own.wait_at("between launches")
    time.sleep(0.1)
    assert client.sets == 0
    time.sleep(0.4)
    assert heartbeat.heartbeats(client)[0].waits == ("between launches",)
    stop()
