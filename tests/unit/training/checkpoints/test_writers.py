"""Who writes what of a checkpoint: whole chunks, each once, and no process much more than the others."""

import collections
import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.training.checkpoints import writers
from lockstep.training.checkpoints.arrays import ArrayReader, merge_arrays, write_arrays
from lockstep.training.checkpoints.writers import busiest_bytes, chunk_shape, chunks_of, share_writing


class Device:
    """A device of a process."""

    def __init__(self, process):
        self.process_index = process


class OnProcesses:
    """The sharding of an array on a mesh of more devices than there are here.

    Args:
        processes: The process of each device of the mesh ``(dp, fsdp)``.
        shards: The parts of each axis of the array, along fsdp; at most one is more than 1.
    """

    def __init__(self, processes, *shards):
        self.processes, self.shards = np.asarray(processes), shards

    def shard_shape(self, shape):
        return tuple(size // parts for size, parts in zip(shape, self.shards, strict=True))

    def devices_indices_map(self, shape):
        found = {}
        for (_, fsdp), process in np.ndenumerate(self.processes):
            part = [size // parts for size, parts in zip(shape, self.shards, strict=True)]
            found[Device(process)] = tuple(
                slice(None) if parts == 1 else slice(fsdp * size, (fsdp + 1) * size)
                for size, parts in zip(part, self.shards, strict=True)
            )
        return found


class Struct:
    """The shape of an array on processes."""

    def __init__(self, shape, processes, *shards):
        self.shape, self.dtype, self.sharding = shape, np.dtype(np.float32), OnProcesses(processes, *shards)
        self.nbytes = 4 * math.prod(shape)


def host_local(hosts, devices=4):
    """Data parallel over hosts, FSDP inside: every host has the whole."""
    return np.repeat(np.arange(hosts), devices).reshape(hosts, devices)


def fsdp(hosts, devices=4):
    return np.repeat(np.arange(hosts), devices).reshape(1, -1)


def loads(structs):
    total = collections.Counter()
    for part in (part for parts in share_writing(structs) for part in parts):
        total[part.process] += part.nbytes
    return total


def assert_written_once(structs):
    for struct, parts in zip(structs, share_writing(structs), strict=True):
        times = np.zeros(struct.shape, np.int8)
        chunk = chunks_of(struct)
        for part in parts:
            times[part.of_array()] += 1
            starts = [each.start or 0 for each in part.of_array()]
            assert all(start % size == 0 for start, size in zip(starts, chunk, strict=True)), "a chunk has one writer"
            assert part.nbytes == 4 * times[part.of_array()].size
        assert (times == 1).all()


@pytest.mark.parametrize("hosts", [2, 8, 64])
def test_replicas_share_the_writing_of_a_model_of_stacked_layers(monkeypatch, hosts):
    """Layers in the proportions of Llama 3 8B, with the two moments of Adam."""
    monkeypatch.setattr(writers, "SPLIT_BYTES", 1000)
    on = host_local(hosts)
    kinds = [(128, 32, 1, 4), (32, 32, 32, 4), (32, 32, 112, 4), (32, 32, 112, 4), (32, 112, 32, 4), (32, 32, 1, 4)]
    structs = [Struct(shape, on, 1, 1, 1, 4) for _ in range(3) for shape in kinds] + [Struct((), on)]
    assert_written_once(structs)
    total, found = sum(each.nbytes for each in structs), loads(structs)
    assert busiest_bytes(structs) == max(found.values()) <= 1.15 * total / hosts
    assert sum(found.values()) == total


def test_one_array_that_all_have_is_written_in_parts_by_all(monkeypatch):
    monkeypatch.setattr(writers, "CHUNK_BYTES", 64)
    structs = [Struct((40, 16), host_local(4), 1, 1)]
    assert_written_once(structs)
    assert loads(structs) == dict.fromkeys(range(4), 640)


def test_without_replicas_each_writes_what_it_has_and_what_is_replicated_goes_round():
    on = fsdp(4)
    structs = [Struct((16, 6), on, 16, 1), *(Struct((6,), on, 1) for _ in range(8)), Struct((), on)]
    assert_written_once(structs)
    found = loads(structs)
    assert max(found.values()) - min(found.values()) <= 24 and sum(found.values()) == 16 * 24 + 8 * 24 + 4


def test_there_may_be_nothing_to_write():
    assert (share_writing([]), busiest_bytes([])) == ([], 0)


def test_who_writes_what_is_found_once_for_all_saves_of_a_run(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "fsdp"))
    values = [jax.device_put(np.full((4, 6), n, np.float32), NamedSharding(mesh, P(None, "fsdp"))) for n in range(2)]
    found = share_writing(values[:1])
    with monkeypatch.context() as patch:
        patch.setattr(writers, "_pieces", lambda *_: pytest.fail("it is known"))
        assert share_writing(values[1:]) == found
    assert share_writing([jax.device_put(values[0], NamedSharding(mesh, P("dp")))]) != found


def test_real_shardings_have_their_shards_named_as_their_arrays_do():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "fsdp"))
    value = jax.device_put(np.ones((4, 6), np.float32), NamedSharding(mesh, P(None, "fsdp")))
    (parts,) = share_writing([value])
    assert {part.shard for part in parts} == {shard.index for shard in value.addressable_shards}
    assert {part.process for part in parts} == {0}


@pytest.mark.parametrize(
    ("shard", "max_bytes", "single_axes", "chunk"),
    [
        ((), 1, (), ()),
        ((6, 4), 1000, (), (6, 4)),
        ((6, 4), 48, (), (3, 4)),
        ((6, 4), 40, (), (2, 4)),
        ((7, 4), 40, (), (1, 4)),
        ((7, 4), 8, (), (1, 2)),
        ((5, 6, 4), 1000, (0,), (1, 6, 4)),
    ],
)
def test_chunks_divide_a_shard_and_are_no_larger_than_asked(shard, max_bytes, single_axes, chunk):
    assert chunk_shape(shard, 4, max_bytes, single_axes) == chunk


def test_the_parts_of_all_processes_are_the_whole_and_each_writes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "CHUNK_BYTES", 4096)
    rng = np.random.default_rng(0)
    saved = {name: jax.device_put(rng.standard_normal((240, 64)).astype(np.float32)) for name in ("a", "b")}
    # A sharding of one device gives the index of its shard without an end.
    plan = writers.share_writing([Struct((240, 64), host_local(3, 1), 1, 1)] * 2)
    monkeypatch.setattr(writers, "share_writing", lambda arrays: plan)
    path = epath.Path(tmp_path)
    sizes = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        write_arrays(path, saved)()
        files = (tmp_path / f"ocdbt.process_{process}").rglob("*")
        sizes.append(sum(file.stat().st_size for file in files if file.is_file()))
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    merge_arrays(path)
    reader = ArrayReader(path)
    for name, value in saved.items():
        np.testing.assert_array_equal(reader.read(name, ()), np.asarray(value))
    assert max(sizes) < 1.2 * min(sizes), "each has a third, and an index"


def test_importing_the_package_leaves_the_settings_of_the_log_to_the_user():
    """Orbax's import calls `basicConfig`, after which that of the user's script has no effect."""
    script = """
import logging
import lockstep.training
assert logging.getLogger().handlers == []
logging.basicConfig(level=logging.INFO, format="mine: %(message)s")
logging.getLogger("lockstep.training").info("shown")
"""
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "mine: shown" in run.stderr.splitlines(), run.stderr
