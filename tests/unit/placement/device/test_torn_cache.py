"""A torn entry of the compilation cache is removed when it is met, and written anew."""

import logging
import warnings
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.hosts import Ledger
from lockstep.placement.device.program import compile_program
from lockstep.placement.device.torn_cache import remove_torn_entries, torn_entries_removed
from tests.unit.engine.models import mesh_of


@pytest.fixture
def cache(tmp_path: Path):
    """JAX's cache in a directory of its own, with every program in it."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def build():
    mesh = mesh_of("1,4,1")
    struct = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    return compile_program("double", lambda x: 2 * x, [struct], mesh=mesh, ledger=Ledger())


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("jit_lockstep_double-*-cache"))


def test_a_torn_entry_is_removed_and_the_next_process_writes_it_again(cache, caplog, recwarn):
    build()
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING, "lockstep"):
        build()
    assert entries(cache) == [] and f"removed {entry}" in caplog.text
    assert not [one for one in recwarn if "persistent compilation cache" in str(one.message)]
    caplog.clear()
    build()
    assert entries(cache) == [entry] and len(entry.read_bytes()) > len(whole) // 2
    build()
    assert caplog.text == ""


def test_an_entry_that_is_damaged_otherwise_stays_and_jax_says_so(cache):
    build()
    (entry,) = entries(cache)
    entry.write_bytes(b"not compressed at all")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        build()
    assert entries(cache) == [entry]


def test_only_torn_entries_of_the_program_are_removed(cache):
    data = zlib.compress(bytes(range(256)) * 64)
    for name, content in {"jit_f-1-cache": data, "jit_f-2-cache": data[:-5], "jit_g-3-cache": data[:-5]}.items():
        (cache / name).write_bytes(content)
    assert remove_torn_entries("jit_f") == [cache / "jit_f-2-cache"]
    assert sorted(path.name for path in cache.iterdir()) == ["jit_f-1-cache", "jit_g-3-cache"]


def test_other_warnings_are_shown():
    with pytest.warns(DeprecationWarning, match="old"), torn_entries_removed("jit_f"):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
