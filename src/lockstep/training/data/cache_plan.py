"""What a cache is made of: its files, its rows, and the key by which a later run finds it."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

from lockstep.training.data.examples import DataFormat
from lockstep.training.data.packing import RowShape
from lockstep.training.data.sources import MAX_LINE_BYTES, Chunk, SourceFile, make_chunks

CACHE_VERSION = 3
"""To be raised by whoever changes which rows are made of the same files, or how they are stored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePlan:
    """A cache that is wanted.

    Args:
        name: The source's name in messages.
        files: The files of the source.
        format: What their records are.
        shape: How examples become rows.
        tokenizer_digest: The digest of the tokenizer with its chat template.
        max_line_bytes: The bytes of a JSON line at most.
    """

    name: str
    files: tuple[SourceFile, ...]
    format: DataFormat
    shape: RowShape
    tokenizer_digest: str
    max_line_bytes: int = MAX_LINE_BYTES

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
        limits = [] if self.max_line_bytes == MAX_LINE_BYTES else [self.max_line_bytes]
        return _digest([CACHE_VERSION, self.tokenizer_digest, self.format.name, shape, files, self.chunks, *limits])


def _digest(value: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
