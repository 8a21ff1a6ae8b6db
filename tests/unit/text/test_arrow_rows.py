"""Rows of Parquet and Arrow: as many in memory as there is room for, and none that is too long."""

import pytest

from lockstep.errors import ConfigError, PromptError
from lockstep.text import arrow_rows, read_prompts
from lockstep.text.arrow_rows import BATCH_ROWS, parquet_rows
from lockstep.training.data.records import BadRow, list_files, read_piece

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'jax-lockstep[parquet]')")
pq = pytest.importorskip("pyarrow.parquet")

MIB = 1 << 20


def batches(path, columns=None, max_bytes=64 * MIB):
    """The rows of a file, and the most rows and bytes of a batch while they were read."""
    most = [0, 0]
    before = arrow_rows.batch_rows

    def counted(batch, limit):
        most[:] = max(most[0], batch.num_rows), max(most[1], batch.nbytes)
        return before(batch, limit)

    with pytest.MonkeyPatch.context() as patch, open(path, "rb") as stream, pq.ParquetFile(stream) as table:
        patch.setattr(arrow_rows, "batch_rows", counted)
        rows = list(parquet_rows(table, stream, range(table.num_row_groups), columns, max_bytes))
    return rows, *most


def test_rows_come_as_they_are_in_large_batches(tmp_path):
    message = {"role": "user", "content": "é" * 9}
    rows = [{"id": i, "messages": [message | {"name": str(i)}] * (i % 3), "x": None} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1700)
    read, most, _ = batches(tmp_path / "a.parquet")
    assert read == rows and most == BATCH_ROWS
    assert batches(tmp_path / "a.parquet", ["id"])[0] == [{"id": i} for i in range(3000)]


@pytest.mark.parametrize("compression", ["zstd", "gzip", "none"])
def test_a_value_that_a_file_has_once_and_many_rows_name_is_not_in_memory_as_often(tmp_path, monkeypatch, compression):
    monkeypatch.setattr(arrow_rows, "BATCH_BYTES", 4 * MIB)
    file = tmp_path / "a.parquet"
    table = pa.table({"text": ["z" * MIB] * 20})
    pq.write_table(table, file, compression=compression, dictionary_pagesize_limit=1 << 30)
    rows, _, size = batches(file)
    assert [len(row["text"]) for row in rows] == [MIB] * 20 and size < 4.5 * MIB
    assert batches(file, max_bytes=MIB // 2)[0] == [None] * 20


def test_a_row_that_is_too_long_is_a_bad_row_or_refused_by_its_number(tmp_path):
    file = tmp_path / "a.parquet"
    texts = ["a"] * 1500 + ["z" * (2 * MIB)] + ["b"]
    pq.write_table(pa.table({"prompt": texts}), file, use_dictionary=False, compression="zstd")
    with pytest.raises(PromptError, match=r"a\.parquet:1501 has more than 1,048,576 bytes \(max_line_bytes\)"):
        read_prompts(str(file), max_line_bytes=MIB)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.schema({"prompt": "str"})) as out:
        out.write_table(pa.table({"prompt": texts}))
    for name in ("a.parquet", "a.arrow"):
        (source,) = list_files(str(tmp_path / name), "data.train_urls")
        read = list(read_piece(source, 0, 1, (), max_line_bytes=MIB))
        bad = [(number, str(record)) for number, _, record in read if isinstance(record, BadRow)]
        assert bad == [(1501, "has more than 1,048,576 bytes (data.max_line_bytes). Raise that, or remove the line.")]
        assert len(read) == 1502


def test_rows_that_are_all_too_long_are_refused_before_any_is_decompressed(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["z" * (3 * MIB)]}), file, use_dictionary=False, compression="zstd")
    assert file.stat().st_size < MIB // 8
    with pytest.raises(ConfigError, match=r"row group 0 have 3,145,\d{3} bytes each, and at most 1,048,576 are read"):
        batches(file, max_bytes=MIB)


@pytest.mark.parametrize("layout", [{}, {"data_page_version": "2.0"}, {"row_group_size": 4}])
def test_pages_that_become_far_larger_than_they_are_stored_are_refused_before_they_do(tmp_path, monkeypatch, layout):
    """One column is within the limit, two together are not."""
    file = tmp_path / "a.parquet"
    rows = {"a": ["z" * MIB] * 8, "b": ["z" * MIB] * 8}
    pq.write_table(pa.table(rows), file, use_dictionary=False, compression="zstd", **layout)
    assert file.stat().st_size < MIB // 8 and len(batches(file)[0]) == 8
    group = min(layout.get("row_group_size", 8), 8)
    monkeypatch.setattr(arrow_rows, "BATCH_BYTES", (2 * group - 1) * MIB)
    assert len(batches(file, ["a"])[0]) == 8
    with pytest.raises(ValueError, match=r"its pages say that \d.* bytes become 1?\d,\d{3},\d{3}; at most"):
        batches(file)
    (source,) = list_files(str(file), "data.train_urls")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read: ValueError: its pages say"):
        list(read_piece(source, 0, 1, ("a", "b")))


def test_a_page_whose_header_lies_about_its_size_is_refused(tmp_path):
    """The header's second field, the size, is made 2 GiB; nothing else of the file changes."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": ["x" * 64 * MIB * 2]}), file, use_dictionary=False, compression="zstd")
    data = bytearray(file.read_bytes())
    assert data[4:7] == b"\x15\x00\x15" and data[10] & 0x80 and not data[11] & 0x80  # a size of five bytes
    data[7:12] = b"\xfe\xff\xff\xff\x0f"
    file.write_bytes(data)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(ValueError, match=r"bytes become 2,147,483,647; at most 268,435,456 are read"):
        batches(file, max_bytes=256 * MIB)
    assert pa.default_memory_pool().max_memory() <= max(before, 1 << 28)
