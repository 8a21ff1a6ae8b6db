"""Rows of Arrow and Parquet, in memory that does not grow with what a small file can be decompressed to."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

BATCH_ROWS: Final = 1000  # rows that are in memory at a time, fewer where they are large
BATCH_BYTES: Final = 256 << 20  # bytes that the rows of a batch may take
_HEADER_BYTES: Final = 1 << 16  # bytes of a file in which the header of a page is, with its statistics
_EXPANSION: Final = 128
"""Bytes that a byte of a compressed page may become where the pages of a batch take more than `BATCH_BYTES`."""
_DEEPEST: Final = 8  # structures within one another in the header of a page, which has three


def parquet_rows(
    table: "ParquetFile", stream: Any, groups: Sequence[int], columns: Sequence[str] | None, max_bytes: int
) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of row groups, each as a dictionary; None for one that has more than ``max_bytes``.

    A dictionary of values is kept once in a file and once for each row in memory, so a batch has as many rows as fit
    with the largest dictionary. pyarrow takes as much memory for a page as its header says, so headers are looked at
    before it has them. What is left to a file that lies is a list that repeats a value of a dictionary.

    Args:
        stream: The file that ``table`` reads.
        columns: The names of the columns; None for all.

    Raises:
        ConfigError: The rows of a group have more than ``max_bytes`` each, on average; or two columns have one name.
        ValueError: The pages of a group are larger than `BATCH_BYTES` and than what such a file can be compressed from.
    """
    from pyarrow.parquet import ParquetFile

    names = table.schema_arrow.names
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"it has two columns {min(twice)!r}. Rename or remove one of them")
    for number in groups:
        group = table.metadata.row_group(number)
        if not group.num_rows:  # it has no pages
            continue
        parts = [group.column(index) for index in range(group.num_columns)]
        parts = [column for column in parts if columns is None or column.path_in_schema.split(".")[0] in columns]
        mean = sum(column.total_uncompressed_size for column in parts) // max(group.num_rows, 1)
        if mean > max_bytes:
            raise ConfigError(
                f"the rows of row group {number} have {mean:,} bytes each, and at most {max_bytes:,} are read "
                "(max_line_bytes). Raise that, or cut the rows"
            )
        position = stream.tell()
        largest = max(mean, sum(_dictionary_bytes(stream, column) for column in parts))
        stream.seek(position)
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(largest, 1)))
        with ParquetFile(_PagesFile(stream, parts), metadata=table.metadata) as checked:
            for batch in checked.iter_batches(rows, row_groups=[number], columns=columns):
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


class _PagesFile:
    """A Parquet file whose pages are refused before pyarrow has them, where together they say that they are too large.

    Args:
        columns: The metadata of the chunks that are read.
    """

    closed = False

    def __init__(self, stream: Any, columns: Sequence[Any]) -> None:
        self._stream = stream
        self._chunks = {_first_page(column): column.total_compressed_size for column in columns}
        self._largest: dict[int, _Page] = {}

    def read(self, size: int = -1) -> bytes:
        start = self._stream.tell()
        data: bytes = self._stream.read(size)
        for place, length in self._chunks.items():
            if start <= place < start + len(data):  # neighbours are read together
                pages = _pages(data[place - start : place - start + length])
                self._largest[place] = max(pages, key=lambda page: page.size, default=_Page(0, 0, 0))
        expanded = sum(page.size for page in self._largest.values())
        stored = sum(page.stored for page in self._largest.values())
        if expanded > max(BATCH_BYTES, _EXPANSION * stored):
            raise ValueError(
                f"its pages say that {stored:,} bytes become {expanded:,}; at most {BATCH_BYTES:,} are read, or "
                f"{_EXPANSION} for each"
            )
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        place: int = self._stream.seek(offset, whence)
        return place

    def tell(self) -> int:
        place: int = self._stream.tell()
        return place

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the file open, for the next row group."""


class _Page(NamedTuple):
    """Sizes that the header of a page has, and its place."""

    size: int  # bytes after decompression
    stored: int  # bytes in the file
    end: int  # the place after the header


def _pages(chunk: bytes) -> Iterator[_Page]:
    """Yield the pages of a column chunk."""
    at = 0
    while at < len(chunk):
        page = _page(chunk, at)
        yield page
        at = page.end + page.stored


def _page(data: bytes, at: int) -> _Page:
    """Read the header of a page at a place.

    https://github.com/apache/parquet-format: a header is a Thrift structure in the compact protocol, whose second and
    third field are the sizes of the page after and before decompression, both numbers of 32 bits.
    """
    try:
        fields, end = _structure(data, at, 0)
        size, stored = fields[2], fields[3]
    except (IndexError, KeyError, RecursionError):
        size = stored = -1
    if min(size, stored) < 0:
        raise ValueError("the header of a page is none")
    return _Page(size, stored, end)


def _structure(data: bytes, at: int, depth: int) -> tuple[dict[int, int], int]:
    """Read a structure of Thrift: its numbers by field, and the place after it."""
    if depth > _DEEPEST:
        raise IndexError
    fields: dict[int, int] = {}
    name = 0
    while (head := data[at]) != 0:
        at += 1
        if head >> 4:
            name += head >> 4
        else:
            name, at = _number(data, at)
        if head & 15 in (4, 5, 6):
            fields[name], at = _number(data, at)
        else:
            at = _after(data, at, head & 15, depth)
    return fields, at + 1


def _after(data: bytes, at: int, kind: int, depth: int) -> int:
    """The place after a value that is no number."""
    if kind in (1, 2):  # true and false, which the type says
        return at
    if kind in (3, 7):  # a byte, and a double
        return at + (1 if kind == 3 else 8)
    if kind == 8:
        size, at = _length(data, at)
        return at + size
    if kind == 12:
        return _structure(data, at, depth + 1)[1]
    raise IndexError  # lists, sets and maps, which no header has


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Read a number without a sign, and the place after it."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if shift > 63:
            raise IndexError
    return value | byte << shift, at + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Read a number with a sign (zigzag), and the place after it."""
    value, at = _length(data, at)
    return value >> 1 ^ -(value & 1), at


def _first_page(column: Any) -> int:
    """The place of a column's first page; that of the dictionary comes before those of data."""
    offsets = [column.data_page_offset]
    if column.has_dictionary_page:
        offsets.append(column.dictionary_page_offset)
    place: int = min(offset for offset in offsets if offset > 0)
    return place


def _dictionary_bytes(stream: Any, column: Any) -> int:
    """The bytes of a column's dictionary, as its page header says; 0 where it has none."""
    if not column.has_dictionary_page:
        return 0
    stream.seek(column.dictionary_page_offset)
    return _page(stream.read(_HEADER_BYTES), 0).size
