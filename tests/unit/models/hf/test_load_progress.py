"""What is said while a checkpoint is read."""

import logging

import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.models.hf.load_progress import LoadProgress


def test_the_leader_says_how_much_it_has_read_how_fast_and_who_is_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for hosts in map(Hosts, reversed(MemoryClient.hub(2))):
        told: list[tuple[int, int]] = []
        progress = LoadProgress(hosts, 4 << 20, lambda *counts, told=told: told.append(counts))
        progress._start -= 2.0
        progress.show([progress.note(1 << 20), 0.0])
        progress._last -= 10.0
        progress.show([progress.note(3 << 20), 0.5])
        assert hosts.last_phase == "loading the checkpoint, 3.00 MiB of 4.00 MiB read"
        progress.show([progress.note(4 << 20), 1.0])
        progress.show([progress.note(4 << 20), 1.0])
        assert told == [(1 << 20, 4 << 20), (2 << 20, 4 << 20), (1 << 20, 4 << 20)]
    early, end = (record.getMessage() for record in caplog.records)
    assert (
        early.startswith("loading: 3.00 MiB of 4.00 MiB on this host, 1.")
        and "MiB/s; process 1 is last with 50%" in early
    )
    assert end.startswith("loading: 4.00 MiB of 4.00 MiB on this host, ") and end.endswith(" MiB/s")
