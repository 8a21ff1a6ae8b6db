"""Placing host data on several hosts: nothing is launched or gathered, and memory does not follow the process count."""

import numpy as np
import pytest

from tests.multiprocess.harness import run_processes

pytestmark = pytest.mark.multiprocess

MIB = 2**20
PLACED_MIB = 64
PEAK = "what a peak of memory grows by shows in a fresh process alone"


def body_place_without_a_launch(hosts):
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from lockstep.placement import fsdp_spans_hosts, host_rows, make_mesh, place, place_local

    mesh, local_mesh = make_mesh("auto"), make_mesh("host_local")
    assert fsdp_spans_hosts(mesh) and not fsdp_spans_hosts(local_mesh)
    n = jax.device_count()
    values = np.arange(n * 8 * 4, dtype=np.float32).reshape(n * 8, 4)
    # Hosts enter one after the other: whoever waited for another one here would run into the time-out.
    for turn in range(hosts.count):
        if turn == hosts.index:
            with jax.no_execution(True):
                placed = {
                    "sharded": place(values, NamedSharding(mesh, P("fsdp"))),
                    "replicated": place(values, NamedSharding(mesh, P())),
                    "mixed": place(values, NamedSharding(local_mesh, P("fsdp", None))),
                }
                rows = NamedSharding(local_mesh, P(("dp", "fsdp")))
                mine = host_rows(rows, len(values))
                placed["local"] = place_local(values[mine], rows, len(values))
        hosts.barrier(f"turn-{turn}")
    for array in placed.values():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    # The global value is right too, seen through a program that all hosts launch.
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(local_mesh, P()))(placed["local"])
    assert float(total.addressable_data(0)) == values.sum()
    return [mine.start, mine.stop]


def body_peak_memory(hosts, how):
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from lockstep.placement import make_mesh, place

    sharding = NamedSharding(make_mesh(), P(None, "fsdp"))
    values = np.ones((PLACED_MIB * 2**8, 2**10), np.float32)
    hosts.barrier("before")
    before = _peak_bytes()
    placed = place(values, sharding) if how == "place" else jax.device_put(values, sharding)
    jax.block_until_ready(placed)
    hosts.barrier("after")
    return (_peak_bytes() - before) / MIB


def _peak_bytes():
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def grown(processes, how):
    """What the peak of the worst process grew by, in MiB."""
    return max(run_processes(body_peak_memory, processes=processes, args=(how,), own=PEAK))


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_placing_launches_nothing_and_waits_for_nobody(processes):
    rows = run_processes(body_place_without_a_launch, processes=processes)
    assert rows == [[16 * i, 16 * (i + 1)] for i in range(processes)]


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_processes():
    four = grown(4, "place")
    print(f"placing {PLACED_MIB} MiB: peak grew by {four:.0f} MiB with 4 processes")
    # A host's own shards (the devices are host memory here) and a little for the runtime.
    assert four <= PLACED_MIB / 4 + 16


@pytest.mark.nightly
def test_the_comparison_that_place_avoids_does_grow():
    two, four = grown(2, "device_put"), grown(4, "device_put")
    print(f"device_put of {PLACED_MIB} MiB: peak grew by {two:.0f} MiB with 2 processes, {four:.0f} MiB with 4")
    assert four > two
