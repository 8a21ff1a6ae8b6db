"""Places that a checkpoint is saved to: what is there counts only when it is complete."""

from pathlib import Path

import fsspec
import pytest

from lockstep.errors import ConfigError
from lockstep.models.hf.save_target import BucketTarget, LocalTarget, save_target


def write(target, name="model.safetensors", data=b"weights"):
    with target.create(name) as file:
        file.write(data)


def config_beside_more(directory):
    for name in ("config.json", "tokenizer.json"):
        (Path(directory) / name).write_text("{}")


def complete(target):
    target.begin()
    write(target)
    target.write_small(config_beside_more)
    target.commit()


@pytest.fixture
def bucket():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()


def names(filesystem):
    return sorted(path.rsplit("/", 1)[-1] for path in filesystem.store)


def test_a_url_of_the_disk_is_the_disk(tmp_path):
    assert isinstance(save_target(f"file://{tmp_path}/out", "a"), LocalTarget)
    assert isinstance(save_target("memory://out", "a"), BucketTarget)


def test_a_directory_appears_as_a_whole(tmp_path):
    target = save_target(tmp_path / "out", "a")
    target.begin()
    write(target)
    target.write_small(config_beside_more)
    assert not (tmp_path / "out").exists()
    target.commit()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_killed_processes_left_is_removed_by_the_next_save(tmp_path):
    save_target(tmp_path / "out", "killed").begin()
    other = save_target(tmp_path / "out2", "other")
    other.begin()
    complete(save_target(tmp_path / "out", "b"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out2.tmp-other", "out"]


def test_only_who_sees_the_leaders_directory_writes(tmp_path):
    leader, other = save_target(tmp_path / "out", "a"), save_target(tmp_path / "out", "a")
    elsewhere = save_target(tmp_path / "elsewhere" / "out", "a")
    leader.begin()
    assert leader.seen() and other.seen() and not elsewhere.seen()


def test_what_is_not_a_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"is not a checkpoint \(no config\.json\).*Choose another path"):
        save_target(tmp_path, "a").begin()


def test_in_a_bucket_the_configuration_is_written_last(bucket, monkeypatch):
    written = []
    pipe = type(bucket).pipe_file
    monkeypatch.setattr(
        type(bucket), "pipe_file", lambda self, path, *a, **k: (written.append(path), pipe(self, path, *a, **k))
    )
    target = save_target("memory://bucket/out", "a")
    target.begin()
    assert target.seen() and not save_target("memory://bucket/out", "b").seen()
    write(target)
    assert names(bucket) == [".saving-a", "model.safetensors"]
    target.write_small(config_beside_more)
    target.commit()
    assert written[-1].endswith("/config.json")
    assert names(bucket) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_in_a_bucket_the_old_checkpoint_counts_no_more_when_a_new_one_begins(bucket):
    complete(save_target("memory://bucket/out", "a"))
    bucket.pipe_file("/bucket/out/model-00001-of-00002.safetensors", b"of another")
    bucket.pipe_file("/bucket/out/notes.txt", b"somebody's")
    target = save_target("memory://bucket/out", "b")
    target.begin()
    assert names(bucket) == [".saving-b", "notes.txt", "tokenizer.json"]
    write(target)
    target.abort()
    assert names(bucket) == ["notes.txt", "tokenizer.json"]


def test_a_file_that_is_not_written_to_its_end_is_none(bucket):
    target = save_target("memory://bucket/out", "a")
    target.begin()
    with pytest.raises(OSError, match="no space"), target.create("model.safetensors") as file:
        file.write(b"half")
        raise OSError("no space")
    del file
    assert names(bucket) == [".saving-a"]


STRANGERS = {"README.md": "mine", "original/notes.txt": "years of work", ".git/HEAD": "ref"}


def test_what_is_no_part_of_a_checkpoint_stays_where_one_is_replaced(tmp_path):
    """A name for each kind: a file, one in a directory, one that begins with a dot, a link to elsewhere."""
    place, outside = tmp_path / "out", tmp_path / "outside"
    complete(save_target(place, "a"))
    for name, text in STRANGERS.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    outside.mkdir()
    (outside / "kept").touch()
    (place / "link").symlink_to(outside)
    (place / "model-00001-of-00002.safetensors").touch()  # of the checkpoint that is replaced
    for token in ("b", "c"):
        complete(save_target(place, token))
    for name, text in STRANGERS.items():
        assert (place / name).read_text() == text
    assert (place / "link").is_symlink() and (outside / "kept").exists()
    assert not (place / "model-00001-of-00002.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "outside"]


def test_a_save_that_was_killed_between_its_renames_has_lost_nothing(tmp_path):
    complete(save_target(tmp_path / "out", "a"))
    (tmp_path / "out" / "README.md").write_text("mine")
    target = save_target(tmp_path / "out", "b")
    target.begin()
    target.write_small(config_beside_more)
    (tmp_path / "out").rename(tmp_path / ".out.old-b")  # and then it is killed
    complete(save_target(tmp_path / "out", "c"))
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_whether_a_place_can_be_written_is_found_without_a_change_of_it(tmp_path, bucket):
    complete(save_target(tmp_path / "out", "a"))
    complete(save_target("memory://there/out", "a"))
    before = names(bucket), sorted(tmp_path.rglob("*"))
    for place in (tmp_path / "out", tmp_path / "new", "memory://there/out", "memory://new"):
        save_target(place, "b").check()
    assert (names(bucket), sorted(tmp_path.rglob("*"))) == before
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        save_target(tmp_path / "file" / "below", "b").check()
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        save_target(tmp_path, "b").check()
