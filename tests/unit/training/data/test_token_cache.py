"""What a cache says of itself, and its rows as a data source of grain."""

import io
import itertools
import os
import time

import fsspec
import numpy as np
import pytest

from lockstep import storage
from lockstep.errors import HostTimeoutError
from lockstep.training.data import LmDataConfig, row_records, token_cache
from lockstep.training.data.examples import TokenSequence
from lockstep.training.data.row_records import RowWriter, parse_record
from lockstep.training.data.token_cache import RowReader, cache_file, expand
from tests.unit.training.data.characters import Tokenizer, write


def test_it_is_a_random_access_data_source(tmp_path):
    from grain import MapDataset

    urls = write(tmp_path / "x.jsonl", [{"text": letter * 3} for letter in "abcdef"])
    (cache,) = LmDataConfig(train_urls=urls, packing=False, max_seq_len=6).load(Tokenizer(), 16, 0).caches
    found = [row["tokens"].tolist() for row in MapDataset.source(cache).seed(0).shuffle()]
    assert sorted(found) == cache.take(range(6))["tokens"].tolist() != found


def test_the_digest_follows_the_rows(tmp_path):
    def digest(text, seed=0, **values):
        urls = write(tmp_path / f"{text}.jsonl", [{"text": text}] * 3)
        rows = LmDataConfig(**({"train_urls": urls, "max_seq_len": 8} | values)).load(Tokenizer(), 16, seed)
        return rows.digest()

    assert digest("ab") == digest("ab")
    assert len({digest("ab"), digest("ac"), digest("ab", seed=1), digest("ab", shuffle=False)}) == 4
    assert digest("ab", max_seq_len=7) != digest("ab")


def row_of(number):
    """Row ``number``: one or two sequences with tokens of their own."""
    return [TokenSequence(n, list(range(number, number + 3 + n + number % 4))) for n in range(1 + number % 2)]


def write_rows(fs, directory, counts):
    first = 0
    for chunk, count in enumerate(counts):
        with cache_file(fs, f"{directory}/{chunk}.rows") as rows, cache_file(fs, f"{directory}/{chunk}.index") as index:
            writer = RowWriter(rows, index)
            for number in range(first, first + count):
                writer.write(row_of(number))
            writer.finish()
        assert writer.count == count
        first += count
    return RowReader(fs, lambda chunk, suffix: f"{directory}/{chunk}.{suffix}", counts)


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    for name, age in (("dead.rows.ab.tmp", 7200), ("alive.rows.cd.tmp", 60), ("chunk-00000.rows", 7200)):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    token_cache.remove_dead_files(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive.rows.cd.tmp", "chunk-00000.rows"]


def test_no_more_than_some_rows_wait_in_memory(monkeypatch):
    monkeypatch.setattr(row_records, "FLUSH_ROWS", 4)
    stream = io.BytesIO()
    writer, sizes = RowWriter(stream, io.BytesIO()), []
    for number in range(9):
        writer.write(row_of(number))
        sizes.append(stream.tell())
    assert sizes[2] == 0 < sizes[3] == sizes[6] < sizes[7] == sizes[8]


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_rows_are_read_back_by_number(tmp_path, monkeypatch, protocol):
    monkeypatch.setattr(row_records, "FLUSH_ROWS", 4)
    fs = fsspec.filesystem(protocol)
    reader = write_rows(fs, str(tmp_path), [5, 0, 1, 9])
    assert len(reader) == 15 and len(RowReader(fs, lambda *_: "", [])) == 0
    wanted = [14, 0, 5, 4, 6, 14]
    for number, record in zip(wanted, reader.read(wanted), strict=True):
        found = [(n_prompt, tokens.tolist()) for n_prompt, tokens in parse_record(record)]
        assert found == [(one.n_prompt, one.tokens) for one in row_of(number)]


def test_a_file_appears_as_a_whole_or_not_at_all(tmp_path):
    fs = fsspec.filesystem("file")
    path = str(tmp_path / "x")
    with cache_file(fs, path) as stream:
        stream.write(b"old")
    mapped = np.memmap(path, np.uint8, "r")
    with pytest.raises(KeyError), cache_file(fs, path) as stream:
        stream.write(b"half")
        raise KeyError
    assert [one.name for one in tmp_path.iterdir()] == ["x"]
    with cache_file(fs, path) as stream:
        stream.write(b"new")
    assert bytes(mapped) == b"old" and (tmp_path / "x").read_bytes() == b"new"


@pytest.fixture
def requests(monkeypatch):
    """The bytes of each request to a bucket."""
    fs, sizes = fsspec.filesystem("memory"), []

    def cat_file(path, start=None, end=None, **_):
        data = type(fs).cat_file(fs, path, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(fs, "cat_file", cat_file, raising=False)
    return sizes


def same(records, numbers):
    for record, number in zip(records, numbers, strict=True):
        found = [(n_prompt, tokens.tolist()) for n_prompt, tokens in parse_record(record)]
        assert found == [(one.n_prompt, one.tokens) for one in row_of(number)]


def test_a_cache_in_a_bucket_that_fits_in_memory_is_read_once(tmp_path, requests):
    reader = write_rows(fsspec.filesystem("memory"), str(tmp_path), [300, 0, 400, 300])
    order = np.random.default_rng(0).permutation(1000)
    for batch in np.split(order, 20):
        same(reader.read(batch), batch)
    assert len(requests) == 6, "index and rows of each of three chunks that have any"


def test_of_a_larger_cache_neighbouring_rows_are_one_request_and_the_index_is_read_once(
    tmp_path, monkeypatch, requests
):
    """A host reads what its rows take, not the files that they are in."""
    fs = fsspec.filesystem("memory")
    write_rows(fs, str(tmp_path), [1000, 1000])
    reader = RowReader(fs, lambda chunk, suffix: f"{tmp_path}/{chunk}.{suffix}", [1000, 1000], resident=False)
    monkeypatch.setattr(token_cache, "GAP_BYTES", 64)
    same(reader.read(range(990, 1054)), range(990, 1054))
    assert len(requests) == 4, "two indices, two runs"
    requests.clear()
    scattered = [1500, 3, 1999, 3, 700]
    same(reader.read(scattered), scattered)
    assert len(requests) == 4 and sum(requests) < 400


def test_neighbouring_ranges_are_joined():
    ranges = [(1, 0, 5), (0, 20, 30), (0, 0, 10), (0, 12, 15), (0, 2, 4), (0, 31, 31)]
    assert token_cache.neighbouring(ranges, 3) == [(0, 0, 15), (0, 20, 31), (1, 0, 5)]
    assert token_cache.neighbouring(ranges, 1) == [(0, 0, 10), (0, 12, 15), (0, 20, 30), (0, 31, 31), (1, 0, 5)]


@pytest.mark.parametrize("fails", ["once", "always"])
def test_a_bucket_that_fails_is_tried_again_and_then_named(monkeypatch, fails):
    """Asynchronous file systems return what went wrong in the place of bytes."""
    fs = fsspec.filesystem("memory")
    write_rows(fs, "/cache", [10])
    failures = itertools.repeat(ConnectionResetError("gone"), 1 if fails == "once" else 1 << 30)
    original = fs.cat_ranges

    def cat_ranges(paths, *bounds, **options):
        return [failure for failure, _ in zip(failures, paths, strict=False)] or original(paths, *bounds, **options)

    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fs, "cat_ranges", cat_ranges, raising=False)
    reader = RowReader(
        fs, lambda chunk, suffix: f"/cache/{chunk}.{suffix}", [10], wait_s=0.2 if fails == "always" else 60
    )
    if fails == "once":
        same(reader.read([7]), [7])
        return
    with pytest.raises(
        HostTimeoutError, match=r"reading rows of memory:///cache/0.index; .*ConnectionResetError: gone"
    ):
        reader.read([7])


def test_token_0_is_a_token_whether_it_is_trained_on_or_not():
    """Its complement, which marks what is not trained on, is the -1 that others use for nothing."""
    record = np.array([1, 1, 5, 0, 7, 0, ~0, ~7])  # a prompt of one token; then two that count, and two that do not
    found = expand([record], "single", 6)
    assert found["tokens"].tolist() == [[0, 7, 0, 0, 7, 0]]
    assert found["loss_mask"].tolist() == [[False, True, True, False, False, False]]
