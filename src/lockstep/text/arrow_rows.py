"""Rows of Arrow and Parquet, in memory that does not grow with what a small file can be decompressed to."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

BATCH_ROWS: Final = 1000  # rows that are in memory at a time, fewer where they are large
BATCH_BYTES: Final = 256 << 20  # bytes that the rows of a batch may take
_HEADER_BYTES: Final = 64  # bytes of a file in which the sizes of a page are


def parquet_rows(
    table: "ParquetFile", stream: Any, groups: Sequence[int], columns: Sequence[str] | None, max_bytes: int
) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of row groups, each as a dictionary; None for one that has more than ``max_bytes``.

    A dictionary of values is kept once in a file and once for each row in memory, so a batch has as many rows as fit
    with the largest dictionary. What is left to a file that lies is a page, 2 GiB for each column, and a list that
    repeats a value of a dictionary.

    Args:
        stream: The file that ``table`` reads.
        columns: The names of the columns; None for all.

    Raises:
        ConfigError: The rows of a group have more than ``max_bytes`` each, on average.
    """
    for number in groups:
        group = table.metadata.row_group(number)
        parts = [group.column(index) for index in range(group.num_columns)]
        parts = [each for each in parts if columns is None or each.path_in_schema.split(".")[0] in columns]
        mean = sum(each.total_uncompressed_size for each in parts) // max(group.num_rows, 1)
        if mean > max_bytes:
            raise ConfigError(
                f"the rows of row group {number} have {mean:,} bytes each, and at most {max_bytes:,} are read "
                "(max_line_bytes). Raise that, or cut the rows"
            )
        position = stream.tell()
        largest = max(mean, sum(_dictionary_bytes(stream, each) for each in parts))
        stream.seek(position)
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(largest, 1)))
        for batch in table.iter_batches(rows, row_groups=[number], columns=columns):
            yield from batch_rows(batch, max_bytes)


def batch_rows(batch: "RecordBatch", max_bytes: int) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a batch, each as a dictionary; None for one that has more than ``max_bytes``."""
    for start in range(0, batch.num_rows, BATCH_ROWS):
        rows = batch.slice(start, BATCH_ROWS)
        if rows.nbytes <= max_bytes:
            yield from rows.to_pylist()
            continue
        for row in (rows.slice(index, 1) for index in range(rows.num_rows)):
            yield row.to_pylist()[0] if row.nbytes <= max_bytes else None


def _dictionary_bytes(stream: Any, column: Any) -> int:
    """The bytes of a column's dictionary, as its page header says; 0 where it has none.

    https://github.com/apache/parquet-format: a header is a Thrift structure in the compact protocol, whose first
    fields are the type of the page and its size after decompression, both numbers of 32 bits.
    """
    if not column.has_dictionary_page:
        return 0
    stream.seek(column.dictionary_page_offset)
    header = iter(stream.read(_HEADER_BYTES))
    values = []
    for _ in range(2):
        if next(header) != 0x15:  # the next field, a number
            raise ValueError("the header of a dictionary page is none")
        value, shift = 0, 0
        while (byte := next(header)) & 0x80:
            value, shift = value | (byte & 0x7F) << shift, shift + 7
        values.append(value | byte << shift)
    return values[1] >> 1  # zigzag
