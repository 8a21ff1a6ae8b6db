"""A cache that is wanted, and the rows of one chunk of it: read, tokenised, packed and written in bounded memory."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.errors import ConfigError
from lockstep.json_text import parse_json, refused, typed
from lockstep.limits import LINE_BYTES, read_object, read_objects
from lockstep.printable import without_credentials
from lockstep.text import template_message_changes, unknown_token
from lockstep.training.data.examples import DataFormat, Example
from lockstep.training.data.packing import Row, RowShape
from lockstep.training.data.records import (
    BadRow,
    Chunk,
    Record,
    SourceFile,
    lines_before,
    make_chunks,
    read_piece,
)
from lockstep.training.data.row_records import RowWriter
from lockstep.training.data.token_cache import FIX, CacheMetadata, cache_file, chunk_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_VERSION = 6  # to be raised by whoever changes which rows are made of the same files, or how they are stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A cache that is wanted."""

    name: str
    files: tuple[SourceFile, ...]
    format: DataFormat  # what their records are
    shape: RowShape  # how examples become rows
    tokenizer_digest: str  # the digest of the tokenizer with its chat template
    vocab_size: int | None = None  # rows of the model's embedding, where the tokenizer has more tokens; else None
    max_line_bytes: int = LINE_BYTES
    embedding: int | None = None  # rows of the model's embedding; None where they are not known

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The parts that hosts share out."""
        return make_chunks(self.files)

    @functools.cached_property
    def key(self) -> str:
        """The name of its directory: a digest of all that its rows depend on."""
        return _digest([self.content, [file.changed for file in self.files]])

    @functools.cached_property
    def content(self) -> str:
        """A digest that is the same on hosts with equal copies of the files, whenever they were copied."""
        files = [[file.path.rpartition("/")[2], file.size, file.content, file.kind] for file in self.files]
        shape = dataclasses.asdict(self.shape)
        limits: list[object] = [] if self.max_line_bytes == LINE_BYTES else [self.max_line_bytes]
        limits += [] if self.vocab_size is None else [f"ids below {self.vocab_size}"]
        limits += template_message_changes()  # none before transformers 5.24
        return _digest([CACHE_VERSION, self.tokenizer_digest, self.format.name, shape, files, self.chunks, *limits])


def _digest(value: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


BATCH_RECORDS = 500  # records that are tokenised in one call
KEPT_BAD = 20  # bad rows of a chunk whose places are kept; all are counted

type OnProgress = Callable[[int, int, str], None]
"""Takes the bytes just read, the number of bad rows just found and the path of the file."""


class ChunkBuilder:
    """One chunk that is being written into the cache."""

    def __init__(self, spec: CacheSpec, number: int, *, raise_at_bad_row: bool, progress: OnProgress) -> None:
        self._spec, self._number = spec, number
        self._raise, self._progress = raise_at_bad_row, progress
        self._lines: list[int] = []
        self._bad: list[tuple[int, int, str]] = []
        self._counts = {"examples": 0, "unpacked_rows": 0, "dropped": 0, "n_bad": 0}

    def build(self, fs: Any, directory: str, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Write the files of the chunk; the last one says that it is complete, and what is in it."""
        shape, n_chunks = self._spec.shape, len(self._spec.chunks)
        with contextlib.ExitStack() as files:
            writers = []
            for bucket in range(len(shape.lengths)):
                paths = [chunk_file(directory, bucket * n_chunks + self._number, name) for name in ("rows", "index")]
                writers.append(RowWriter(*(files.enter_context(cache_file(fs, path)) for path in paths)))
            for row in self._rows(tokenizer):
                writers[shape.bucket(row)].write(row)
            buckets = [{"digest": writer.finish(), "rows": writer.count, "tokens": writer.tokens} for writer in writers]
        facts = {"buckets": buckets, "lines": self._lines, **self._counts, "bad": self._bad}
        with cache_file(fs, chunk_file(directory, self._number, "json")) as stream:
            stream.write(json.dumps(facts).encode())

    def _rows(self, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Row]:
        packer, shape = self._spec.shape.packer(), self._spec.shape
        for piece, (number, part, parts) in enumerate(self._spec.chunks[self._number]):
            file = self._spec.files[number]
            self._lines.append(0)
            fields = (*self._spec.format.fields, *self._spec.format.optional)
            records = read_piece(file, part, parts, fields, self._spec.max_line_bytes)
            read = 0
            for batch in itertools.batched(records, BATCH_RECORDS):
                bad_before = self._counts["n_bad"]
                for line, fitting in fit_records(self._spec, tokenizer, batch):
                    if isinstance(fitting, BadRow):
                        self._note_bad(piece, line, fitting)
                    elif fitting is None:
                        self._counts["dropped"] += 1
                    else:
                        self._counts["examples"] += 1
                        self._counts["unpacked_rows"] += -(-len(fitting[0].tokens) // shape.length)
                        yield from packer.add(fitting)
                self._lines[-1], position = batch[-1][0], batch[-1][1]
                self._progress(position - read, self._counts["n_bad"] - bad_before, file.path)
                read = position
        yield from packer.finish()

    def _note_bad(self, piece: int, line: int, bad: BadRow) -> None:
        self._counts["n_bad"] += 1
        if len(self._bad) < KEPT_BAD:
            self._bad.append((piece, line, str(bad)))
        if self._raise:
            raise ConfigError(self.first_bad())

    def first_bad(self) -> str:
        """Name the first bad row of the chunk, counting the lines before it in its file."""
        piece, line, text = self._bad[0]
        number, part, parts = self._spec.chunks[self._number][piece]
        file = self._spec.files[number]
        return f"{place(file.path, lines_before(file, part, parts), line)} {text}"


def fit_records(
    spec: CacheSpec,
    tokenizer: "PreTrainedTokenizerBase",
    batch: Sequence[tuple[int, int, Record | BadRow | None]],
) -> Iterator[tuple[int, Example | BadRow | None]]:
    """Tokenise records as `read_piece` yields them, and cut them to the rows of a cache.

    Yields:
        The line of each record, and its example; what is wrong with it; or None where its prompt fills a row.
    """
    good = [record for _, _, record in batch if record is not None and not isinstance(record, BadRow)]
    examples = iter(spec.format.tokenize(tokenizer, good) if good else ())
    for line, _, record in batch:
        if record is not None:
            example = record if isinstance(record, BadRow) else next(examples)
            fitting = example if isinstance(example, BadRow) else spec.shape.fit(example)
            yield line, _known(spec, tokenizer, fitting)


def _known(
    spec: CacheSpec, tokenizer: "PreTrainedTokenizerBase", example: Example | BadRow | None
) -> Example | BadRow | None:
    """An example, or what is wrong with it where the model does not have a token of it."""
    if spec.vocab_size is None or example is None or isinstance(example, BadRow):
        return example
    tokens = np.concatenate([np.asarray(sequence.tokens, np.int32) for sequence in example])
    ids = np.maximum(tokens, ~tokens).tolist()  # one that is no target is stored as its complement
    unknown = unknown_token(tokenizer, ids, spec.vocab_size)
    return example if unknown is None else BadRow(unknown)


def place(path: str, before: int, line: int) -> str:
    """Name the place of a record; ``line`` counts from 1 after the ``before`` lines of earlier parts, 0 in a text."""
    path = without_credentials(path)  # kept in the cache
    return f"{path}:{before + line}" if line else path


def read_chunk(fs: Any, directory: str, number: int) -> dict[str, Any] | None:
    """Return what is in a chunk; None where it is not complete."""
    path = chunk_file(directory, number, "json")
    try:
        content = parse_json(read_object(fs, path), path, dict, FIX)
    except FileNotFoundError:
        return None
    with refused(path, FIX):
        return content | {"n_bad": typed(int, content["n_bad"])}


def summarise_chunks(fs: Any, path: str, spec: CacheSpec) -> CacheMetadata:
    """The metadata of the chunks of a cache, with the lines of bad rows counted from the beginnings of their files."""
    fs.invalidate_cache()
    paths = [chunk_file(path, number, "json") for number in range(len(spec.chunks))]
    chunks = [
        parse_json(*object_and_path, dict, FIX) for object_and_path in zip(read_objects(fs, paths), paths, strict=True)
    ]
    with refused(path, FIX):
        return _summary(chunks, spec)


def _summary(chunks: Sequence[Mapping[str, Any]], spec: CacheSpec) -> CacheMetadata:
    lines = [0] * len(spec.files)
    bad: list[str] = []
    for pieces, chunk in zip(spec.chunks, chunks, strict=True):
        before = []
        for (number, _, _), read in zip(pieces, chunk["lines"], strict=True):
            before.append(lines[number])
            lines[number] += read
        for piece, line, why in chunk["bad"]:
            bad.append(f"{place(spec.files[pieces[piece][0]].path, before[piece], line)} {why}")
    buckets = [chunk["buckets"][bucket] for bucket in range(len(spec.shape.lengths)) for chunk in chunks]
    return CacheMetadata(
        layout=spec.shape.layout,
        lengths=spec.shape.lengths,
        chunk_rows=tuple(bucket["rows"] for bucket in buckets),
        digests=tuple(bucket["digest"] for bucket in buckets),
        tokens=sum(bucket["tokens"] for bucket in buckets),
        bad=tuple(bad),
        **{name: sum(chunk[name] for chunk in chunks) for name in ("examples", "unpacked_rows", "dropped", "n_bad")},
    )
