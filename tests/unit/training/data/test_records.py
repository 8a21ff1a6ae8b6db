"""Records that cannot be used are named by file and line; files that cannot be read end the run."""

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from lockstep.errors import ConfigError
from lockstep.training.data import LmDataConfig, PreferenceDataConfig, records
from lockstep.training.data.records import BadRow, list_files, make_chunks, read_piece
from tests.unit.training.data.characters import Tokenizer, columns, preference, write


@pytest.mark.parametrize(
    ("record", "data_format", "text"),
    [
        ({"prompt": "a"}, "prompt_completion", r"x.jsonl:1 has no field 'completion'"),
        ({"prompt": "a", "completion": 3}, "prompt_completion", r"x.jsonl:1 has 3 as 'completion'; it must be a text"),
        (
            {"prompt": " ", "completion": "b"},
            "prompt_completion",
            r"x.jsonl:1 has a prompt that cannot be used: is emp",
        ),
        ({"prompt": "a"}, "text", "no field 'text'.*data.format"),
        ({"messages": [{"role": "user", "content": "x"}]}, "chat", "ends with role 'user'"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, "chat", "needs the texts 'role'"),
        ([1], "text", "JSON list, not an object"),
        ('{"text": "a", "text": "b"}', "text", "x.jsonl:1 has the key 'text' twice in one object. Remove one"),
        (
            '{"messages": [{"role": "user", "role": "assistant", "content": "b"}]}',
            "chat",
            "x.jsonl:1 has the key 'role' twice",
        ),
    ],
)
def test_wrong_records(tmp_path, record, data_format, text):
    urls = write(tmp_path / "x.jsonl", [record])
    if isinstance(record, str):
        (tmp_path / "x.jsonl").write_text(record)
    with pytest.raises(ConfigError, match=text):
        LmDataConfig(train_urls=urls, format=data_format, on_bad_row="raise").load(Tokenizer(), 16, 0)
    with pytest.raises(ConfigError, match=f"0 rows.*1 records cannot be used: .*{text}"):
        LmDataConfig(train_urls=urls, format=data_format).load(Tokenizer(), 16, 0)


def test_a_pair_must_answer_one_prompt(tmp_path):
    pair = preference("good", "no") | {"rejected": preference("x", "no", question="other")["rejected"]}
    config = PreferenceDataConfig(train_urls=write(tmp_path / "x.jsonl", [pair]), on_bad_row="raise")
    with pytest.raises(ConfigError, match=r"x.jsonl:1 has 'chosen' and 'rejected' that differ"):
        config.load(Tokenizer(), 16, 0)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_giant_line_is_a_bad_row_that_is_not_read_whole(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(records, "MIN_CHUNK_BYTES", 100)
    lines = [b'{"text": "one"}', b'{"text": "' + b"a" * 1000 + b'"}', b'{"text": "three"}', b"[" * 100_000]
    path = tmp_path / f"x.{suffix}"
    path.write_bytes((gzip.compress if suffix.endswith("gz") else bytes)(b"\n".join(lines)))
    settings = {"train_urls": (str(path),), "packing": False, "max_seq_len": 2000}
    limited = LmDataConfig(**settings, max_line_bytes=500).load(Tokenizer(), 2000, 0)
    assert len(limited) == 2
    assert [place.rpartition("/")[2] for place in limited.caches[0].metadata.bad] == [
        f"x.{suffix}:{line} has more than 500 bytes (data.max_line_bytes). Raise that, or remove the line."
        for line in (2, 4)
    ]
    # Raised, the line is read: the first cache is not taken for this one.
    unlimited = LmDataConfig(**settings).load(Tokenizer(), 2000, 0)
    assert len(unlimited) == 3
    assert [place.rpartition("/")[2] for place in unlimited.caches[0].metadata.bad] == [
        f"x.{suffix}:4 is JSON that is nested too deeply to be read. Write one object per line, in UTF-8."
    ]


@pytest.mark.parametrize("make", ["as_parquet", "as_dataset"])
def test_rows_of_tables_are_named_by_their_numbers(tmp_path, monkeypatch, make):
    monkeypatch.setitem(RECORDS[33], "prompt", " ")
    config = LmDataConfig(train_urls=(str(globals()[make](tmp_path)),), format="prompt_completion", on_bad_row="raise")
    row = {"as_parquet": r"x.parquet:34", "as_dataset": r"data-00001-of-00002.arrow:14"}[make]
    with pytest.raises(ConfigError, match=f"{row} has a prompt that cannot be used"):
        config.load(Tokenizer(), 16, 0)


def test_of_a_table_as_much_was_read_as_its_share_of_the_rows(tmp_path):
    (file,) = records.list_files(str(as_parquet(tmp_path)), "data")
    for parts in (1, 2):
        read = [n_bytes for part in range(parts) for *_, n_bytes, _ in [list(read_piece(file, part, parts, ()))[-1]]]
        assert sum(read) == pytest.approx(file.size, rel=0.1)


def test_missing_files_and_no_files(tmp_path):
    with pytest.raises(ConfigError, match=r"none.jsonl.*Check data.train_urls"):
        LmDataConfig(train_urls=(str(tmp_path / "none.jsonl"),)).load(Tokenizer(), 16, 0)
    with pytest.raises(ConfigError, match="train_urls is empty"):
        LmDataConfig().load(Tokenizer(), 16, 0)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="x.json:1 is a JSON list, not an object. Write one object per line"):
        LmDataConfig(train_urls=(str(tmp_path / "x.json"),)).load(Tokenizer(), 16, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("y.jsonl", b""),
        ("y.jsonl", b"\n\n"),
        ("y.jsonl.gz", gzip.compress(b"")),
        ("y.txt", b""),
    ],
)
def test_a_file_without_records_among_others_is_named(tmp_path, caplog, name, content):
    (tmp_path / name).write_bytes(content)
    urls = (*write(tmp_path / "x.jsonl", [{"text": "a"}]), str(tmp_path / name))
    LmDataConfig(train_urls=urls, format="text").load(Tokenizer(), 16, 0)
    assert f"{name} has no records. Write it again, or take it out of the data." in caplog.text
    with pytest.raises(ConfigError, match=rf"{name} has no records"):
        LmDataConfig(train_urls=urls, format="text", on_bad_row="raise").load(Tokenizer(), 16, 0)


def test_a_link_to_nothing_is_not_left_out_of_what_a_wildcard_matches(tmp_path):
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"cannot be opened: FileNotFoundError: .*b\.jsonl"):
        list_files(str(tmp_path / "*.jsonl"), "data.train_urls")


def archive():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as target:
        target.addfile(tarfile.TarInfo("a.txt"))
    return stream.getvalue()


LINES = b'{"text": "a"}\n{"text": "b"}\n'
NO_TEXTS = {
    "train.jsonl-00000-of-00002": (LINES, r"JSON object in its first line.*end in .jsonl"),
    "part-00000": (LINES, r"JSON object in its first line.*end in .jsonl"),
    "train.jsonl.txt": (b'{"text": "a"}', r"JSON object in its first line.*end in .jsonl"),
    "a.tar": (archive(), r"has bytes of 0, as archives"),
    "a.tar.gz": (gzip.compress(archive()), r"has bytes of 0, as archives"),
    "a.txt": (b"version https://git-lfs.github.com/spec/v1\n", r"is a pointer of Git LFS"),
}


@pytest.mark.parametrize("name", NO_TEXTS)
def test_what_is_no_text_is_no_document(tmp_path, name):
    content, text = NO_TEXTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"1 records cannot be used: .*{name}.* {text}"):
        LmDataConfig(train_urls=(str(tmp_path / name),)).load(Tokenizer(), 16, 0)


@pytest.mark.parametrize("text", ["{a}\n", '["a"]', "{", "\ufeff"])
def test_texts_of_braces_are_documents_and_the_mark_of_their_encoding_is_none_of_their_text(tmp_path, text):
    (tmp_path / "a.txt").write_text("\ufeff" + text, encoding="utf-8")
    ((_, _, record),) = read_piece(one(tmp_path / "a.txt"), 0, 1, ())
    assert record == {"text": text}


def test_a_broken_archive_is_not_a_bad_row(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(b"\x1f\x8b\x08 no")
    with pytest.raises(ConfigError, match=r"x.jsonl.gz cannot be read"):
        LmDataConfig(train_urls=(str(tmp_path / "x.jsonl.gz"),)).load(Tokenizer(), 16, 0)


def one(path):
    (file,) = list_files(str(path), "data.train_urls")
    return file


def compressed(suffix, data):
    codecs = {"gz": gzip, "bz2": bz2, "xz": lzma, "zst": zstandard}
    return codecs[suffix].compress(data)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("kept", ["half of a frame", "half of the second frame", "the head of the second frame"])
def test_a_part_of_a_compressed_file_is_not_taken_for_the_whole(tmp_path, suffix, kept):
    first, second = (compressed(suffix, json.dumps({"text": text * 4000}).encode() + b"\n") for text in ("äb", "cd"))
    parts = {
        "half of a frame": first[: len(first) // 2],
        "half of the second frame": first + second[: len(second) // 2],
        "the head of the second frame": first + second[:3],
    }
    path = tmp_path / f"x.jsonl.{suffix}"
    path.write_bytes(first + second)
    assert [record["text"][:2] for _, _, record in read_piece(one(path), 0, 1, ())] == ["äb", "cd"]
    path.write_bytes(parts[kept])
    with pytest.raises(ConfigError, match=rf"(?i)x.jsonl.{suffix} cannot be read: EOFError: .* ended before"):
        list(read_piece(one(path), 0, 1, ()))


RECORDS = [{"prompt": f"{n}?", "completion": "x" * (n % 5), "more": n} for n in range(50)]


def text_of(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def as_gzip(path):
    (path / "x.jsonl.gz").write_bytes(gzip.compress(text_of(RECORDS)))
    return path / "x.jsonl.gz"


def as_zstd(path):
    (path / "x.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(text_of(RECORDS)))
    return path / "x.jsonl.zst"


def as_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path / "x.parquet", row_group_size=8)
    return path / "x.parquet"


def as_dataset(path):
    """What ``Dataset.save_to_disk`` writes: two shards, named in their order by state.json."""
    import pyarrow

    table = pyarrow.Table.from_pylist(RECORDS)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (table[:20], table[20:]), strict=True):
        with pyarrow.OSFile(str(path / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part, max_chunksize=7)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


def as_arrow_file(path):
    """The format of Arrow with the table of contents at its end."""
    import pyarrow

    table = pyarrow.Table.from_pylist(RECORDS)
    with pyarrow.OSFile(str(path / "x.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    return path / "x.arrow"


def in_memory(path):
    import fsspec

    with fsspec.open("memory://data/x.jsonl", "wb") as file:
        file.write(text_of(RECORDS))
    return "memory://data/x.jsonl"


def by_wildcard(path):
    for number in range(5):
        (path / f"part-{number}.jsonl").write_bytes(text_of(RECORDS[number * 10 : number * 10 + 10]))
    return path / "part-*.jsonl"


def by_links(path):
    (path / "blobs").mkdir()
    by_wildcard(path / "blobs")
    for number in range(5):  # as in the cache of the Hugging Face hub
        (path / f"{number}.jsonl").symlink_to(f"blobs/part-{number}.jsonl")
    return path / "[0-9].jsonl"


def by_wildcard_in_brackets(path):
    (path / "runs [v2]*").mkdir()
    return by_wildcard(path / "runs [v2]*")


def in_brackets(path):
    (path / "a [1-2]?.jsonl").write_bytes(text_of(RECORDS))
    return path / "a [1-2]?.jsonl"


@pytest.mark.parametrize(
    "make",
    [as_gzip, as_zstd, as_parquet, as_dataset, as_arrow_file, in_memory, by_wildcard, by_links, in_brackets]
    + [by_wildcard_in_brackets],
)
def test_every_format_gives_the_same_rows(tmp_path, monkeypatch, make):
    monkeypatch.setattr(records, "MIN_CHUNK_BYTES", 300)
    expected = LmDataConfig(train_urls=write(tmp_path / "plain.jsonl", RECORDS), format="prompt_completion")
    config = LmDataConfig(train_urls=(str(make(tmp_path)),), format="prompt_completion")
    found, wanted = (columns(one.load(Tokenizer(), 12, 0)) for one in (config, expected))
    assert len(found["tokens"]) == 50
    for name, column in wanted.items():
        assert found[name].tolist() == column.tolist()


def test_a_small_file_is_known_by_its_content_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text("1")
    before = one(tmp_path / "a.jsonl")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert (one(tmp_path / "a.jsonl").content, before.changed) == (before.content, "")
    (tmp_path / "a.jsonl").write_text("2")
    assert one(tmp_path / "a.jsonl").content != before.content


def test_a_large_file_is_known_by_its_ends_and_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "WHOLE_BYTES", 5)
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
    monkeypatch.setattr(records, "MIN_CHUNK_BYTES", 100)
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


@pytest.mark.parametrize("name", ["data.csv", "data.tsv", "data.csv.gz"])
def test_a_table_is_no_document(tmp_path, name):
    (tmp_path / name).write_text("text,label\na,b\n")
    with pytest.raises(ConfigError, match=rf"{name} is a table, which is not read as data"):
        list_files(str(tmp_path / name), "data.train_urls")


def test_jsonlines_are_json_lines(tmp_path):
    (tmp_path / "data.jsonlines").write_text('{"text": "a"}\n')
    (file,) = list_files(str(tmp_path / "data.jsonlines"), "data.train_urls")
    assert [record for _, _, record in read_piece(file, 0, 1, ("text",))] == [{"text": "a"}]


def write_packed(path, text):
    pack = {".gz": lambda: gzip.compress(text, 1), ".zst": lambda: zstandard.compress(text)}
    path.write_bytes(pack.get(path.suffix, lambda: text)())


PIECES = {"spaces": b" ", "lines": b"x" * 999 + b"\n"}
TRACED = {
    **{f"{piece} {name}": name for name in ("a.txt", "a.txt.gz", "a.txt.zst") for piece in PIECES},
    **{name: name for name in ("a.jsonl.gz", "a.jsonl.zst")},
}


def traced_read(case, directory):
    """The records of a large file, bad ones as their text in a list, and the most bytes that reading it took."""
    path, endless = Path(directory) / TRACED[case], (120 if "zst" in case else 40) << 20
    piece = PIECES.get(case.partition(" ")[0])
    line = b'{"text": "' + b" " * endless + b'"}\n{"text": "b"}\n'
    write_packed(path, line if piece is None else piece * (endless // len(piece)))
    (file,) = list_files(str(path), "data.train_urls")
    tracemalloc.start()
    rows = [row for _, _, row in read_piece(file, 0, 1, (), **({"max_line_bytes": 1 << 20} if piece is None else {}))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return [[str(row)] if isinstance(row, BadRow) else row for row in rows], peak


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """What `traced_read` gives of each case, in a process of its own: other threads of this one take memory too."""
    script = f"""
import json
from tests.unit.training.data.test_records import TRACED, records, traced_read
records.TEXT_BYTES = 3 << 20
print(json.dumps({{case: traced_read(case, {str(tmp_path_factory.mktemp("traced"))!r}) for case in TRACED}}))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", TRACED)
def test_what_has_no_end_is_a_bad_row_and_not_in_memory(traced, case):
    """The row after a compressed line is read."""
    (bad, *rest), peak = traced[case]
    assert rest == ([{"text": "b"}] if "jsonl" in case else [])
    assert peak < (80 if "zst" in case else 16) << 20, "zstd keeps a window of what it has read"
    assert isinstance(bad, list) and ("jsonl" in case or "has more than 3,145,728 bytes of text" in bad[0])
