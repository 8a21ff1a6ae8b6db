"""Arrays that are written, and read with every chunk compared."""

import gc
import sys
import time

import jax
import numpy as np
import pytest
import tensorstore
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import ConfigError
from lockstep.training.checkpoints import writers
from lockstep.training.checkpoints.arrays import ArrayReader, damage_named, merge_arrays, read_arrays, write_arrays
from lockstep.training.checkpoints.checkpoint import CheckpointDirectory, DamagedCheckpointError, named_arrays
from tests import fake_gcs
from tests.unit.training.checkpoints.test_checkpoint import metadata


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path / "checkpoints"))


def arrays(mesh, spec, size=(8, 12)):
    rng = np.random.default_rng(0)
    tree = {"a": {"w": rng.standard_normal(size).astype(np.float32), "n": np.int32(7)}, "b": [np.arange(4)]}
    named = named_arrays(tree)
    return {
        name: jax.device_put(value, NamedSharding(mesh, spec if np.ndim(value) == 2 else P()))
        for name, value in named.items()
    }


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
    digest = merge_arrays(path)
    other = Mesh(np.array(jax.devices()[:2]), ("y",))
    structs = {
        name: jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=NamedSharding(other, P(None, "y") if value.ndim == 2 else P())
        )
        for name, value in expected.items()
    }
    with jax.no_execution(True), jax.thread_guard(True):
        read = read_arrays(path, structs, digest)
        some = read_arrays(path, {"b.0": structs["b.0"]}, digest)
    assert list(some) == ["b.0"]
    for name, value in expected.items():
        assert read[name].sharding == structs[name].sharding
        np.testing.assert_array_equal(np.asarray(read[name]), value)


def flipped(data, bit):
    """Return bytes of which one bit is another one."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class Written:
    """A checkpoint's arrays on a disk, and how they are read."""

    def __init__(self, path):
        path.mkdir()
        self.path, mesh = epath.Path(path), Mesh(np.array(jax.devices()[:2]), ("x",))
        self.saved = arrays(mesh, P("x"), (64, 48))  # less would be in the index
        write_arrays(self.path, self.saved)()
        self.digest = merge_arrays(self.path)

    def files(self):
        """The files by their kinds."""
        (index,), (manifest,), (tree,) = (list(self.path.glob(each)) for each in ("d/*", "manifest.ocdbt", "_METADATA"))
        (data,) = self.path.glob("ocdbt.process_0/d/*")
        return {"data": data, "index": index, "manifest": manifest, "tree": tree}

    def read(self):
        structs = {
            name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding)
            for name, each in self.saved.items()
        }
        return {name: np.asarray(each) for name, each in read_arrays(self.path, structs, self.digest).items()}

    def read_parts(self):
        reader = ArrayReader(self.path)
        return {name: reader.read(name, ()) for name in self.saved}

    def assert_as_saved(self, found):
        for name, each in self.saved.items():
            np.testing.assert_array_equal(found[name], np.asarray(each))


@pytest.fixture
def written(tmp_path):
    return Written(tmp_path / "arrays")


@pytest.mark.parametrize("kind", ["data", "index", "manifest", "tree"])
@pytest.mark.parametrize("way", ["flipped", "cut", "gone"])
def test_a_damaged_file_of_any_kind_is_found_and_named(written, kind, way):
    file = written.files()[kind]
    whole = file.read_bytes()
    if way == "gone":
        file.unlink()
    else:
        file.write_bytes(flipped(whole, 8 * 20) if way == "flipped" else whole[: len(whole) // 3])
    with pytest.raises(DamagedCheckpointError, match="is damaged: ") as error:
        written.read()
    # Without its manifest a store is an empty one, and orbax looks for arrays elsewhere.
    assert str(file if kind != "manifest" or way != "gone" else written.path) in str(error.value)
    if kind != "tree":  # which parts are read without
        with pytest.raises(DamagedCheckpointError, match="is damaged: "):
            written.read_parts()
    file.write_bytes(whole)
    written.assert_as_saved(written.read())


@pytest.mark.parametrize("place", ["d/*", "ocdbt.process_0/d/*"], ids=["index", "data"])
def test_damage_among_many_arrays_is_one_error_and_no_traceback(tmp_path, monkeypatch, place):
    unraised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: unraised.append(str(error.exc_value)))
    path = epath.Path(tmp_path / "arrays")
    path.mkdir()
    rng = np.random.default_rng(0)
    saved = {f"a.{number}": jax.device_put(rng.standard_normal((64, 48)).astype(np.float32)) for number in range(60)}
    write_arrays(path, saved)()
    digest = merge_arrays(path)
    (file,) = path.glob(place)
    file.write_bytes(flipped(file.read_bytes(), 4 * file.stat().length))
    structs = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for name, array in saved.items()
    }
    with pytest.raises(DamagedCheckpointError, match="is damaged: "):
        read_arrays(path, structs, digest)
    gc.collect()  # reads that nobody waits for end with the frames that have them
    time.sleep(0.5)  # and tell so from tensorstore's threads
    assert not unraised


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(written):
    """A few bytes are read by nobody once the parts of all processes are merged."""
    found = 0
    for file in written.files().values():
        whole = file.read_bytes()
        for byte in range(0, len(whole), max(1, len(whole) // 60)):
            file.write_bytes(flipped(whole, 8 * byte + byte % 8))
            try:
                written.assert_as_saved(written.read())
            except DamagedCheckpointError:
                found += 1
        file.write_bytes(whole)
    assert found > 200


def test_chunks_with_the_checksum_of_an_earlier_version_are_read_and_compared(tmp_path, monkeypatch):
    spec = writers._spec

    def earlier(*args):
        found = spec(*args)
        found["metadata"]["codecs"][1:] = [{"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}]
        return found

    monkeypatch.setattr(writers, "_spec", earlier)
    written = Written(tmp_path / "arrays")
    monkeypatch.undo()
    written.assert_as_saved(written.read())
    file = written.files()["data"]
    file.write_bytes(flipped(file.read_bytes(), 8 * 200))
    with pytest.raises(DamagedCheckpointError, match=f"{file} is damaged: .*Digest mismatch"):
        written.read()


def test_what_is_only_out_of_reach_is_not_damaged(tmp_path):
    with pytest.raises(ValueError, match="^UNAVAILABLE") as error, damage_named(tmp_path):
        raise ValueError("UNAVAILABLE: no route to the bucket [source locations='tensorstore/kvstore/gcs']")
    assert not isinstance(error.value, DamagedCheckpointError)


@pytest.fixture
def bucket(monkeypatch):
    with fake_gcs.serve_here(monkeypatch) as bucket:
        yield bucket


def test_a_bucket_is_as_good_as_a_disk(bucket):
    """tensorstore and gcsfs write and read over HTTP; tensorstore keeps the first address that it sees in a process."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    bucket.objects["bucket/checkpoints/run/step-5/arrays-0/d/1"] = b"half"  # an earlier process was killed
    directory = CheckpointDirectory("gs://bucket/checkpoints/run")
    assert directory.steps() == []
    saved = arrays(mesh, P("x"), (64, 48))
    name = directory.begin(3)
    write_arrays(directory.of(3) / name, saved)()
    digest = merge_arrays(directory.of(3) / name)
    assert directory.steps() == []
    directory.commit(metadata(3, name, tree_digest=digest))
    assert directory.steps() == [3] and directory.metadata(3) == metadata(3, name, tree_digest=digest)
    structs = {"a.w": jax.ShapeDtypeStruct((64, 48), np.float32, sharding=NamedSharding(mesh, P(None, "x")))}
    read = read_arrays(directory.of(3) / name, structs, digest)
    np.testing.assert_array_equal(np.asarray(read["a.w"]), np.asarray(saved["a.w"]))
    for key, whole in {key: data for key, data in bucket.objects.items() if f"/{name}/" in key}.items():
        if not key.endswith("process_0/manifest.ocdbt"):  # nobody reads it any more
            bucket.objects[key] = flipped(whole, 100)
            with pytest.raises(DamagedCheckpointError):
                read_arrays(directory.of(3) / name, structs, digest)
            bucket.objects[key] = whole
    assert directory.unfinished() == [5]
    directory.remove(5)
    assert directory.unfinished() == [] and directory.steps() == [3]
    directory.remove(3)
    assert not bucket.objects


def test_an_array_that_claims_a_huge_chunk_is_refused_before_one_is_read(tmp_path):
    """tensorstore decodes a chunk as a whole: 4 TB for an array of 96 numbers, and its process ends (bad_alloc)."""
    huge = [10**6, 10**6]
    regular = {"name": "regular", "configuration": {"chunk_shape": huge}}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    grid = {"chunk_grid": regular, "data_type": "float32", "shape": [8, 12], "codecs": codecs}
    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "path": "w/"}
    tensorstore.open({"driver": "zarr3", "kvstore": store, "metadata": grid}, create=True).result()
    why = r"array w of .* has shape \(8, 12\) and chunks of \(1000000, 1000000\), 4,000,000,000,000 bytes each"
    with pytest.raises(ConfigError, match=why):
        ArrayReader(epath.Path(tmp_path)).read("w", ())
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    struct = jax.ShapeDtypeStruct((8, 12), np.float32, sharding=NamedSharding(mesh, P("x")))
    with pytest.raises(ConfigError, match=why):
        read_arrays(epath.Path(tmp_path), {"w": struct}, "0" * 64)
