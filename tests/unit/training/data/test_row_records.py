"""Records of rows that nobody has written: whoever can write to a cache's directory makes them up."""

import json
import os

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.data import LmDataConfig, PreferenceDataConfig
from lockstep.training.data.row_records import INDEX, ROW, check_record
from tests.unit.training.data.characters import Tokenizer, columns, preference, write

VOCAB = 256


def single(tmp_path):
    urls = write(tmp_path / "x.jsonl", [{"text": text} for text in ("abc", "de", "fghi")])
    return LmDataConfig(train_urls=urls, packing=False, max_seq_len=8, cache_dir=str(tmp_path / "cache"))


def packed(tmp_path):
    urls = write(tmp_path / "x.jsonl", [{"text": text} for text in ("abc", "de", "fghi")])
    return LmDataConfig(train_urls=urls, max_seq_len=8, cache_dir=str(tmp_path / "cache"))


def pairs(tmp_path):
    urls = write(tmp_path / "x.jsonl", [preference("a?", "b", "c"), preference("d?", "ef", "g")])
    return PreferenceDataConfig(train_urls=urls, max_seq_len=16, cache_dir=str(tmp_path / "cache"))


def labelled(tmp_path):
    records = [{"prompt": "a?", "completion": answer, "label": answer == "b"} for answer in ("b", "cd", "e")]
    urls = write(tmp_path / "x.jsonl", records)
    cache = str(tmp_path / "cache")
    return PreferenceDataConfig(train_urls=urls, format="unpaired_preference", max_seq_len=8, cache_dir=cache)


LAYOUTS = {"single": single, "packed": packed, "pair": pairs, "labelled": labelled}


def read(config):
    return columns(config.load(Tokenizer(), 16, 0, vocab_size=VOCAB))


def with_rows(change):
    """A change of the numbers of a cache's rows."""

    def forge(directory):
        path = directory / "chunk-00000.rows"
        rows = np.fromfile(path, ROW)
        change(rows)
        rows.tofile(path)

    return forge


def with_index(change):
    def forge(directory):
        path = directory / "chunk-00000.index"
        change(np.fromfile(path, INDEX)).astype(INDEX).tofile(path)

    return forge


def with_metadata(**values):
    def forge(directory):
        path = directory / "metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return forge


def put(number, value):
    return with_rows(lambda rows: rows.__setitem__(number, value))


def as_pipe(name):
    def forge(directory):
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return forge


FORGED = {
    "no sequence": put(0, 0),
    "a negative number of sequences": put(0, -1),
    "more sequences than numbers": put(0, 2**31 - 1),
    "a negative size": put(2, -3),
    "a size beyond the row": put(2, 2**31 - 1),
    "a negative prompt": put(1, -1),
    "a prompt longer than its sequence": put(1, 2**31 - 1),
    "a token that the model does not have": put(-1, VOCAB),
    "the complement of one": put(-1, ~VOCAB),
    "the lowest number": put(-1, -(2**31)),
    "half of the rows": lambda directory: os.truncate(directory / "chunk-00000.rows", 8),
    "rows that are no numbers": lambda directory: os.truncate(directory / "chunk-00000.rows", 7),
    "no rows": lambda directory: (directory / "chunk-00000.rows").unlink(),
    "empty rows": lambda directory: os.truncate(directory / "chunk-00000.rows", 0),
    "negative offsets": with_index(lambda ends: ends - 100),
    "offsets that fall": with_index(lambda ends: ends[::-1]),
    "offsets beyond the rows": with_index(lambda ends: ends + 2**40),
    "the highest offsets": with_index(lambda ends: np.full_like(ends, 2**63 - 1)),
    "fewer offsets": with_index(lambda ends: ends[:1]),
    "a pipe of rows": as_pipe("chunk-00000.rows"),
    "a pipe of offsets": as_pipe("chunk-00000.index"),
    "a pipe of metadata": as_pipe("metadata.json"),
    "more rows": with_metadata(chunk_rows=[10**6]),
    "a negative number of rows": with_metadata(chunk_rows=[-1]),
    "rows of another length": with_metadata(lengths=[2**40]),
    "more buckets": with_metadata(lengths=[4, 8], chunk_rows=[1, 1], digests=["", ""]),
    "no length": with_metadata(lengths=[]),
    "no chunk": with_metadata(chunk_rows=[], digests=[]),
    "another layout": with_metadata(layout="none"),
    "a number of 400 digits": with_metadata(tokens=10**400),
}


CASES = [(way, layout) for way in FORGED for layout in (LAYOUTS if list(FORGED).index(way) < 10 else ["packed"])]


@pytest.mark.parametrize(("way", "layout"), CASES)
def test_a_forged_cache_is_an_error_that_names_its_directory(tmp_path, way, layout):
    config = LAYOUTS[layout](tmp_path)
    before = read(config)
    (directory,) = (path for path in (tmp_path / "cache").iterdir() if (path / "metadata.json").exists())
    FORGED[way](directory)
    with pytest.raises(ConfigError, match=f"{directory.name}.*(Remove this directory|regular file)"):
        read(config)
    assert before["tokens"].size


def test_what_a_writer_writes_passes_and_other_sizes_do_not():
    record = np.array([2, 1, 3, 0, 2, 5, 6, ~7, 8, 9])
    check_record(record, "packed", 5, 10)
    check_record(record, "pair", 3, None)
    check_record(np.append(record, [0, 0]), "pair", 3, 10)  # with the log-probabilities of a reference
    for layout, length, vocab_size in (("single", 9, 10), ("packed", 4, 10), ("pair", 2, 10), ("packed", 5, 9)):
        with pytest.raises(ValueError, match="a row "):
            check_record(record, layout, length, vocab_size)
    with pytest.raises(ValueError, match="would have sequences"):
        check_record(np.append(record, 0), "pair", 3, 10)
