"""Values that are posted and read, and keys that are left."""

import pytest

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
