import dataclasses
import hashlib
import json
import os

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.checkpoints import checkpoint
from lockstep.training.checkpoints.checkpoint import (
    METADATA,
    CheckpointDirectory,
    CheckpointMetadata,
    DamagedCheckpointError,
    _sealed,
    bring_files,
    changes,
    keep_files,
    named_arrays,
    shape_texts,
    with_arrays,
    without_arrays,
)


def metadata(step, arrays="arrays-0", **values):
    fields = {
        "tree_digest": "0",
        "loss": 1.5,
        "shapes": {},
        "facts": {},
        "config": {},
        "hooks": {},
        "hooks_called": True,
    }
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


def test_a_linked_checkpoint_is_another_runs_and_stays_as_it_is(directory, tmp_path):
    other = CheckpointDirectory(str(tmp_path / "other"))
    complete(other, 4)
    half = other.begin(5)
    directory.path.mkdir(parents=True, exist_ok=True)
    for step in (4, 5):
        os.symlink(other.of(step), directory.path / f"step-{step}")
        for use in (directory.remove, directory.discard, directory.begin, directory.metadata):
            with pytest.raises(ConfigError, match=rf"step-{step} is a link, .*Put a copy there"):
                use(step)
    assert other.steps() == [4] and (other.of(5) / half).exists()


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
    values = json.loads((directory.of(4) / METADATA).read_text()) | {"format": 99}
    del values["digest"]
    digest = hashlib.sha256(json.dumps(values, indent=1).encode()).hexdigest()
    (directory.of(4) / METADATA).write_text(json.dumps(values | {"digest": digest}, indent=1))
    with pytest.raises(ConfigError, match="reads checkpoints of formats 2 and 3, .* format 99") as error:
        directory.metadata(4)
    assert not isinstance(error.value, DamagedCheckpointError)


def test_a_checkpoint_of_the_version_before_is_read(directory):
    complete(directory, 4)
    values = json.loads((directory.of(4) / METADATA).read_text()) | {"format": 2}
    del values["digest"], values["hook_arrays"]
    (directory.of(4) / METADATA).write_text(_sealed(values))
    assert directory.metadata(4) == metadata(4, values["arrays"])


def test_a_flipped_bit_of_the_metadata_is_found_wherever_it_is(directory):
    complete(directory, 4)
    file = directory.of(4) / METADATA
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(changed))
        with pytest.raises(DamagedCheckpointError, match=f"{METADATA} is damaged: "):
            directory.metadata(4)
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpointError):
        directory.metadata(4)


def test_the_arrays_of_hooks_are_in_a_file_that_its_digest_names(directory):
    """A rollout of 2 million tokens with the experts of 48 layers has 1.5 GB, and of metadata 64 MB are read."""
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4)
    states = {"rollouts": {"number": 2, "columns": {"tokens": tokens, "mask": tokens > 3}, "parts": (tokens[:0], 1.5)}}
    directory.commit(metadata(4, directory.begin(4), hooks=states))
    read = directory.metadata(4)
    file = directory.of(4) / read.hook_arrays
    assert read.hooks["rollouts"]["number"] == 2 and file.stat().length < 1000
    states["rollouts"]["parts"] = list(states["rollouts"]["parts"])
    np.testing.assert_equal(directory.hooks(read), states)
    assert directory.hooks(read)["rollouts"]["columns"]["tokens"].dtype == np.int32

    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(bytes(changed))
        with pytest.raises(DamagedCheckpointError, match=rf"{file} is damaged: its SHA-256 is not that in its name"):
            directory.hooks(read)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{file} is damaged: .*No such file"):
        directory.hooks(read)


def test_a_checkpoint_whose_hooks_could_not_be_read_is_not_written(directory, monkeypatch):
    monkeypatch.setattr(checkpoint, "HOOK_BYTES", 40)
    directory.commit(metadata(4, directory.begin(4), hooks={"a": np.zeros(5)}))
    with pytest.raises(ConfigError, match=r"keeps take 48 bytes; at most 40 are read\. Set rollout_ahead to 0"):
        directory.commit(metadata(5, directory.begin(5), hooks={"a": np.zeros(6)}))
    assert directory.steps() == [4]


def test_arrays_are_named_by_their_paths():
    assert list(named_arrays({"a": {"w": 1}, "b": [2]})) == ["a.w", "b.0"]


def test_shapes_as_texts():
    assert shape_texts({"w": np.zeros((2, 3), np.float32), "s": np.int32(1)}) == {"w": "float32[2,3]", "s": "int32[]"}


def test_changes_are_listed_by_their_keys():
    before = {"a": {"b": 1, "c": (1, 2)}, "gone": 3}
    now = {"a": {"b": 2, "c": [1, 2]}, "new": 4}
    assert changes(before, now) == ["a.b: 1 → 2", "gone: 3 → missing", "new: missing → 4"]


@pytest.mark.parametrize(
    "values",
    [
        {"step": "3"},
        {"loss": None},
        {"shapes": []},
        {"shapes": {"a": 1}},
        {"facts": {"a": []}},
        {"model": "x"},
        {"x": 1},
    ],
)
def test_metadata_of_other_types_are_damaged_whatever_their_digest_says(values):
    whole = {"format": 3, **dataclasses.asdict(metadata(3, "arrays-0"))}
    assert CheckpointMetadata.from_json(_sealed(whole)) == metadata(3, "arrays-0")
    with pytest.raises(DamagedCheckpointError, match=r"metadata\.json cannot be read .*Bring the file back"):
        CheckpointMetadata.from_json(_sealed(whole | values))
    with pytest.raises(DamagedCheckpointError, match=r"names '\.\./other', which is not the name of a file beside it"):
        CheckpointMetadata.from_json(_sealed(whole | {"hook_arrays": "../other"}))


def test_what_was_kept_comes_back_on_another_machine(tmp_path):
    first, second, checkpoints = tmp_path / "first", tmp_path / "second", tmp_path / "bucket" / "run"
    first.mkdir()
    second.mkdir()
    bring_files(str(checkpoints), first, ["a", "b"])
    assert list(first.iterdir()) == [] and not checkpoints.exists()
    keep_files(str(checkpoints), first, ["a", "b"])
    for text in ("1", "2"):
        (first / "a").write_text(text)
        keep_files(str(checkpoints), first, ["a", "b"])
    bring_files(str(checkpoints), second, ["a", "b"])
    assert {path.name: path.read_text() for path in second.iterdir()} == {"a": "2"}
    (second / "a").write_text("newer here")
    bring_files(str(checkpoints), second, ["a", "b"])
    assert (second / "a").read_text() == "newer here"


def test_states_come_back_with_arrays_in_their_places():
    array = np.arange(6).reshape(2, 3)
    states = {"a": {"rows": [array, {"part": array[0]}], "number": 1.5, "none": None}, "b": array[:0]}
    arrays = {}
    values = json.loads(json.dumps(without_arrays(states, arrays)))
    assert sorted(arrays) == ["hooks.a.rows.0", "hooks.a.rows.1.part", "hooks.b"]
    np.testing.assert_equal(with_arrays(values, arrays), states)


def test_an_array_that_is_not_there_is_an_error():
    values = without_arrays({"a": np.zeros(1)}, {})
    with pytest.raises(LookupError, match="hooks.a"):
        with_arrays(values, {})
