"""Files of a source, what they are known by, and their chunks."""

import json
import os

import pytest

from lockstep.errors import ConfigError
from lockstep.training.data import sources
from lockstep.training.data.sources import list_files, make_chunks


def one(path):
    (file,) = list_files(str(path), "data.train_urls")
    return file


def test_a_small_file_is_known_by_its_content_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text("1")
    before = one(tmp_path / "a.jsonl")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert (one(tmp_path / "a.jsonl").content, before.changed) == (before.content, "")
    (tmp_path / "a.jsonl").write_text("2")
    assert one(tmp_path / "a.jsonl").content != before.content


def test_a_large_file_is_known_by_its_ends_and_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "WHOLE_BYTES", 5)
    (tmp_path / "a.jsonl").write_text("12345")
    assert one(tmp_path / "a.jsonl").changed == ""
    (tmp_path / "a.jsonl").write_text("123456789")
    before = one(tmp_path / "a.jsonl")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    after = one(tmp_path / "a.jsonl")
    assert after.content == before.content and after.changed != before.changed != ""


@pytest.mark.parametrize(
    ("name", "kind", "compression", "splits"),
    [
        ("a.jsonl", "jsonl", None, True),
        ("a.jsonl.gz", "jsonl", "gzip", False),
        ("a.jsonl.zst", "jsonl", "zstd", False),
        ("a.parquet", "parquet", None, True),
        ("a.arrow", "arrow", None, False),
        ("a.md", "text", None, True),
    ],
)
def test_what_a_file_is(tmp_path, name, kind, compression, splits):
    (tmp_path / name).write_text("x")
    file = one(tmp_path / name)
    assert (file.kind, file.compression, file.splits) == (kind, compression, splits)


def test_chunks_split_large_files_and_join_small_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MIN_CHUNK_BYTES", 100)
    for name, size in {"a.jsonl": 250, "b.jsonl.gz": 250, "c.txt": 30, "d.txt": 30, "e.txt": 50, "f.txt": 1}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    chunks = make_chunks(list_files(str(tmp_path / "*"), "data.train_urls"))
    parts = [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 1), (5, 0, 1)]
    assert [piece for chunk in chunks for piece in chunk] == parts
    assert [len(chunk) for chunk in chunks] == [1, 1, 1, 1, 2, 1, 1]


def test_a_directory_must_be_one_split_of_a_data_set(tmp_path):
    with pytest.raises(ConfigError, match=r"is a directory.*/\*.jsonl"):
        list_files(str(tmp_path), "data.train_urls")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ConfigError, match="splits train, test.*/train"):
        list_files(str(tmp_path), "data.train_urls")


def test_a_file_system_that_cannot_be_reached():
    with pytest.raises(ConfigError, match="'nonesuch://x' has the protocol 'nonesuch'; a URL must have one of file,"):
        list_files("nonesuch://x", "data.train_urls")
