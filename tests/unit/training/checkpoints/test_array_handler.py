"""Processes that write their parts of the same arrays; here they are one, which plays one after the other."""

import jax
import numpy as np
from etils import epath

from lockstep.training.checkpoints import array_handler, writers
from lockstep.training.checkpoints.arrays import ArrayReader, merge_arrays, write_arrays
from tests.unit.training.checkpoints.test_writers import Struct, host_local


def test_the_parts_of_all_processes_are_the_whole_and_each_writes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "CHUNK_BYTES", 4096)
    rng = np.random.default_rng(0)
    saved = {name: jax.device_put(rng.standard_normal((240, 64)).astype(np.float32)) for name in ("a", "b")}
    # A sharding of one device gives the index of its shard without an end.
    plan = writers.share_writing([Struct((240, 64), host_local(3, 1), 1, 1)] * 2)
    monkeypatch.setattr(array_handler, "share_writing", lambda arrays: plan)
    path = epath.Path(tmp_path)
    sizes = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        write_arrays(path, saved)()
        files = (tmp_path / f"ocdbt.process_{process}").rglob("*")
        sizes.append(sum(file.stat().st_size for file in files if file.is_file()))
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    merge_arrays(path)
    reader = ArrayReader(path, checked=True)
    for name, value in saved.items():
        np.testing.assert_array_equal(reader.read(name, ()), np.asarray(value))
    assert max(sizes) < 1.2 * min(sizes), "each has a third, and an index"
