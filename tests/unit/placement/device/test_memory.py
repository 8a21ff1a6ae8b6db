"""Free memory, as a device, a host or a container reports it."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement import make_mesh
from lockstep.placement.device import chip_named
from lockstep.placement.device import memory as module

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, running or to compile for, with what it reports of its memory."""

    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0
    limit: int | None = None
    used: int = 0
    more: tuple[tuple[str, int], ...] = ()

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": self.used, **dict(self.more)}


def mesh_of(*devices):
    return SimpleNamespace(devices=np.array(devices, dtype=object))


@pytest.fixture
def running(monkeypatch):
    """Makes devices ones that programs can run on."""
    return lambda *devices: monkeypatch.setattr(module, "_running", lambda platform: set(devices))


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Sets what this host says of its memory: bytes available, and the limit and use of its container."""

    def say(available, limit=None, used=0):
        (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
        monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(module, "_CGROUP", tmp_path)
        if limit is not None:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
            (tmp_path / "memory.current").write_text(f"{used}\n")

    return say


def test_the_device_with_the_least_counts(running):
    devices = Device(limit=16 * GIB, used=GIB), Device(limit=16 * GIB, used=9 * GIB)
    running(*devices)
    assert module.free_bytes(mesh_of(*devices)) == 7 * GIB


def test_devices_of_other_processes_do_not_count(running):
    own, other = Device(limit=16 * GIB), Device(limit=GIB, process_index=1)
    running(own, other)
    assert module.free_bytes(mesh_of(own, other)) == 16 * GIB
    assert module.free_bytes(mesh_of(other)) == module.UNBOUNDED


def test_a_device_that_is_over_its_limit_has_nothing_free(running):
    device = Device(limit=GIB, used=2 * GIB)
    running(device)
    assert module.free_bytes(mesh_of(device)) == 0


@pytest.mark.parametrize(
    ("more", "free"),
    [
        ({"largest_free_block_bytes": 3 * GIB}, 3 * GIB),
        ({"largest_free_block_bytes": 15 * GIB}, 7 * GIB),
        ({"largest_free_block_bytes": 0}, 0),
        # What a TPU keeps for its programs is in no array.
        ({"bytes_reserved": 2 * GIB}, 5 * GIB),
        ({"bytes_reserved": 2 * GIB, "largest_free_block_bytes": 6 * GIB}, 5 * GIB),
        # An allocator that has taken 10 of 16 GiB from the device so far.
        ({"largest_free_block_bytes": 0, "pool_bytes": 10 * GIB}, 6 * GIB),
        ({"largest_free_block_bytes": 2 * GIB, "pool_bytes": 16 * GIB}, 2 * GIB),
    ],
)
def test_no_more_counts_as_free_than_one_block_can_have(running, more, free):
    device = Device(platform="tpu", limit=16 * GIB, used=9 * GIB, more=tuple(more.items()))
    running(device)
    assert module.free_bytes(mesh_of(device)) == free


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_memory_of_the_host_is_never_taken_for_that_of_an_accelerator(running, host, platform):
    host(available=8 * GIB)
    device = Device(platform=platform, device_kind="TPU v5 lite")
    running(device)
    with pytest.raises(ConfigError, match=r"TPU v5 lite\) does not report its memory.*Set memory_bytes_per_device"):
        module.free_bytes(mesh_of(device))


def test_of_a_device_to_compile_for_it_is_the_published_memory_less_the_weights(running):
    running()
    weights = [jax.ShapeDtypeStruct((2**20,), np.float32)]
    device = Device(platform="tpu", device_kind="TPU v5")
    assert module.free_bytes(mesh_of(device), weights) == chip_named("TPU v5", "tpu").memory - 4 * 2**20


def test_cpu_devices_share_what_the_host_has(host):
    host(available=8 * GIB)
    assert module.free_bytes(make_mesh("auto")) == 8 * GIB // jax.local_device_count()


@pytest.mark.parametrize(("limit", "free"), [(6 * GIB, 5 * GIB), (2**40, 8 * GIB), ("max", 8 * GIB), (GIB // 2, 0)])
def test_a_container_may_have_less_than_its_host(host, limit, free):
    host(available=8 * GIB, limit=limit, used=GIB)
    assert module._host_bytes() == free


def test_a_sharded_array_takes_its_block_on_each_device():
    mesh = make_mesh("1,2,2")
    split = NamedSharding(mesh, PartitionSpec("fsdp", None))
    assert module.block_bytes(jax.ShapeDtypeStruct((8, 3), np.float32, sharding=split)) == 4 * 3 * 4
    assert module.block_bytes(jax.ShapeDtypeStruct((8, 3), np.int8)) == 24


def test_a_backend_that_counts_nothing_is_told_from_one_that_uses_nothing(monkeypatch):
    monkeypatch.setattr(module, "_stats", lambda: [{}, {}])
    assert module.used_bytes() is None and module.peak_bytes() is None
    monkeypatch.setattr(module, "_stats", lambda: [{"bytes_in_use": 0}, {"bytes_in_use": 5, "peak_bytes_in_use": 9}])
    assert (module.used_bytes(), module.peak_bytes()) == (5, 9)


@pytest.mark.parametrize("rows", [1, 1000])
def test_temporaries_are_in_the_worst_moment_of_a_program_on_a_cpu_whatever_its_arguments_are(rows):
    arguments = jax.ShapeDtypeStruct((128, 128), "float32"), jax.ShapeDtypeStruct((rows, 1024), "float32")
    program = jax.jit(lambda x, y: jnp.sin(x @ x).sum() + y.sum()).lower(*arguments).compile()
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes
    sizes = (128 * 128 + rows * 1024) * 4 + memory.temp_size_in_bytes
    assert sizes <= module.program_bytes(memory, "cpu") < sizes + 1024
