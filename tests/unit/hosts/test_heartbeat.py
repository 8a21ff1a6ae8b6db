"""Signs of life: who is told to be missing, and that posting costs the caller nothing."""

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
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    clients = MemoryClient.hub(3)
    hearts = [heartbeat.Heartbeat(client) for client in clients]
    stops = [heart.beat() for heart in hearts]
    for heart, phase in zip(hearts, ("decode", "decode", "reading"), strict=True):
        heart.enter(phase)
    time.sleep(0.2)
    beats = heartbeat.heartbeats(clients[0])
    assert heartbeat.missing(beats) == ""
    assert heartbeat.elsewhere(beats, "decode") == " Elsewhere: process 2 (last phase 'reading' 0 s ago)."
    stops[1]()
    text = heartbeat.wait_for_missing(clients[0])
    assert re.fullmatch(r" Missing: process 1 \(last phase .decode. \d s ago, no sign of life for \d s\)\.", text), text
    assert "process 1" not in heartbeat.elsewhere(heartbeat.heartbeats(clients[0]), "reading")
    for stop in stops:
        stop()


def test_a_thread_posts_the_latest_of_many_phases():
    (client,) = Counting.hub(1)
    heart = heartbeat.Heartbeat(client)
    heart.enter("first")
    assert client.sets == 1 and heartbeat.heartbeats(client)[0].alive_s is None
    stop = heart.beat()
    for number in range(1000):
        heart.enter(f"phase {number}")
    heart.wait_at("key")
    time.sleep(3 * heartbeat.PAUSE_S)
    beat = heartbeat.heartbeats(client)[0]
    assert (beat.phase, beat.waits[-1], beat.silent) == ("phase 999", "key", False)
    assert client.sets < 20
    stop()
    heart.enter("after")
    assert heartbeat.heartbeats(client)[0].phase == "after"
