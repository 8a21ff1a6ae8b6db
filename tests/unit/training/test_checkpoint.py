import fsspec
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import ConfigError
from lockstep.training.checkpoint import (
    METADATA,
    CheckpointDirectory,
    CheckpointMetadata,
    changes,
    merge_arrays,
    named_arrays,
    read_arrays,
    shape_texts,
    write_arrays,
)
from tests import fake_gcs


def metadata(step, arrays="arrays-0", **values):
    fields = {"loss": 1.5, "shapes": {}, "facts": {}, "config": {}, "hooks": {}, "hooks_called": True}
    return CheckpointMetadata(step=step, arrays=arrays, **(fields | values))


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path / "checkpoints"))


def complete(directory, step):
    directory.commit(metadata(step, directory.begin(step)))


def test_a_checkpoint_exists_once_its_metadata_does(directory):
    assert directory.steps() == []
    name = directory.begin(4)
    assert (directory.of(4) / name).exists() and directory.steps() == []
    directory.commit(metadata(4, name, hooks={"a": {"rounds": 2}}))
    assert directory.steps() == [4]
    assert directory.metadata(4) == metadata(4, name, hooks={"a": {"rounds": 2}})


def test_metadata_torn_in_its_writing_is_none(directory):
    directory.begin(4)
    (directory.of(4) / f"{METADATA}.tmp").write_text('{"format": 1, "st')
    assert directory.steps() == []


def test_steps_are_sorted_as_numbers(directory):
    for step in (10, 9, 100):
        complete(directory, step)
    (directory.path / "step-x").mkdir()
    (directory.path / "other").mkdir()
    assert directory.steps() == [9, 10, 100]


def test_each_attempt_writes_elsewhere(directory):
    assert directory.begin(4) != directory.begin(4)


def test_a_checkpoint_that_is_half_removed_is_none(directory, monkeypatch):
    complete(directory, 4)
    monkeypatch.setattr(type(directory.path), "rmtree", lambda *a, **k: (_ for _ in ()).throw(OSError("busy")))
    with pytest.raises(OSError, match="busy"):
        directory.remove(4)
    assert directory.steps() == []


def test_what_interrupted_saves_left_is_known(directory):
    complete(directory, 4)
    directory.begin(6)
    (directory.path / "notes").mkdir()
    assert directory.unfinished() == [6] and directory.steps() == [4]


def test_another_version_is_refused(directory):
    complete(directory, 4)
    file = directory.of(4) / METADATA
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ConfigError, match="checkpoints of format 1 only"):
        directory.metadata(4)


def arrays(mesh, spec):
    rng = np.random.default_rng(0)
    tree = {"a": {"w": rng.standard_normal((8, 12)).astype(np.float32), "n": np.int32(7)}, "b": [np.arange(4)]}
    named = named_arrays(tree)
    return {
        name: jax.device_put(value, NamedSharding(mesh, spec if np.ndim(value) == 2 else P()))
        for name, value in named.items()
    }


def test_arrays_are_named_by_their_paths():
    assert list(named_arrays({"a": {"w": 1}, "b": [2]})) == ["a.w", "b.0"]


def test_arrays_come_back_on_another_mesh_and_nothing_is_launched(tmp_path, directory):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    saved = arrays(mesh, P("x"))
    expected = {name: np.array(value) for name, value in saved.items()}
    path = directory.path / "arrays"
    path.mkdir(parents=True)
    change = jax.jit(lambda tree: {name: value + 1 for name, value in tree.items()}, donate_argnums=0)
    jax.block_until_ready(change(arrays(mesh, P("x"))))  # compiled
    with jax.no_execution(True), jax.thread_guard(True):
        wait = write_arrays(path, saved)
    jax.block_until_ready(change(saved))  # what was copied must not change with the buffers
    wait()
    merge_arrays(path)
    other = Mesh(np.array(jax.devices()[:2]), ("y",))
    structs = {
        name: jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=NamedSharding(other, P(None, "y") if value.ndim == 2 else P())
        )
        for name, value in expected.items()
    }
    with jax.no_execution(True), jax.thread_guard(True):
        read = read_arrays(path, structs)
        some = read_arrays(path, {"b.0": structs["b.0"]})
    assert list(some) == ["b.0"]
    for name, value in expected.items():
        assert read[name].sharding == structs[name].sharding
        np.testing.assert_array_equal(np.asarray(read[name]), value)


def test_shapes_as_texts():
    assert shape_texts({"w": np.zeros((2, 3), np.float32), "s": np.int32(1)}) == {"w": "float32[2,3]", "s": "int32[]"}


def test_changes_are_listed_by_their_keys():
    before = {"a": {"b": 1, "c": (1, 2)}, "gone": 3}
    now = {"a": {"b": 2, "c": [1, 2]}, "new": 4}
    assert changes(before, now) == ["a.b: 1 → 2", "gone: 3 → missing", "new: missing → 4"]


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed (pip install 'jax-lockstep[gcs]')")
    with fake_gcs.serve() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        fsspec.filesystem("gs").clear_instance_cache()
        yield bucket
        fsspec.filesystem("gs").clear_instance_cache()


def test_a_bucket_is_as_good_as_a_disk(bucket):
    """tensorstore and gcsfs write and read over HTTP; tensorstore keeps the first address that it sees in a process."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    bucket.objects["bucket/checkpoints/run/step-5/arrays-0/d/1"] = b"half"  # an earlier process was killed
    directory = CheckpointDirectory("gs://bucket/checkpoints/run")
    assert directory.steps() == []
    saved = arrays(mesh, P("x"))
    name = directory.begin(3)
    write_arrays(directory.of(3) / name, saved)()
    merge_arrays(directory.of(3) / name)
    assert directory.steps() == []
    directory.commit(metadata(3, name))
    assert directory.steps() == [3] and directory.metadata(3) == metadata(3, name)
    structs = {"a.w": jax.ShapeDtypeStruct((8, 12), np.float32, sharding=NamedSharding(mesh, P(None, "x")))}
    read = read_arrays(directory.of(3) / name, structs)
    np.testing.assert_array_equal(np.asarray(read["a.w"]), np.asarray(saved["a.w"]))
    assert directory.unfinished() == [5]
    directory.remove(5)
    assert directory.unfinished() == [] and directory.steps() == [3]
    directory.remove(3)
    assert not bucket.objects
