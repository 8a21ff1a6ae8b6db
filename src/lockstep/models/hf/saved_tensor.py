"""The tensors of a saved checkpoint, and the file that each is in."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.models.families.registry import family_of
from lockstep.models.hf.files import SINGLE_NAME
from lockstep.models.hf.names import Parameter, parameters
from lockstep.models.hf.stored_names import StoredName, stored_names
from lockstep.models.llama import LlamaLMHeadModel

MIN_PART_BYTES = 64 << 20
"""A checkpoint is not split for the sake of more writers into files of fewer bytes than this."""

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """One tensor of a saved checkpoint, or some rows of one: a parameter, or a layer of one."""

    parameter: Parameter  # the parameter, as arrays or as shapes
    layer: int | None  # number of the layer; None where the parameter is not per layer
    dtype: np.dtype[Any]
    vocab_size: int  # number of rows of the vocabulary that are stored; the parameter may have more
    packed: bool = False  # whether all experts of the family are one tensor ``[expert, output, input]``

    @property
    def place(self) -> int | None:
        """The place of the layer among those of the parameter; None where it is not per layer."""
        return None if self.layer is None else self.parameter.layers.index(self.layer)

    @property
    def names(self) -> list[str]:
        """The names in the checkpoint: one, or one for each expert, whose rows follow one another."""
        return self.parameter.names(self.layer)

    @property
    def name(self) -> str:
        """The first of them."""
        return self.names[0]

    @property
    def written(self) -> list[StoredName]:
        """The tensors of the file that have its rows: those of `names`, or the one that all experts are packed in."""
        plain = [StoredName(name) for name in self.names]
        packed = (place for place in stored_names(self.name) if self.packed and place.expert is not None)
        return [first] if (first := next(packed, None)) else plain

    @property
    def row_axis(self) -> str:
        """The axis of the parameter along which the stored rows are counted: the slowest of the first dimension."""
        return self.parameter.stored.dims[0][0]

    @property
    def rows(self) -> int:
        """The entries of the row axis that are stored; each is one or several rows of the stored tensor."""
        return self.vocab_size if self.row_axis == "vocab" else self.parameter.sizes[self.row_axis]

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape; where a tensor has the rows of several parameters, that of this one's."""
        return self.parameter.stored.shape(self.parameter.sizes | {self.row_axis: self.rows})

    @property
    def nbytes(self) -> int:
        """The stored bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the entries of the row axis, from and to, of pieces of at most so many bytes; one entry at least."""
        step = self.rows_in(most_bytes)
        return ((start, min(start + step, self.rows)) for start in range(0, self.rows, step))

    def rows_in(self, most_bytes: int) -> int:
        """Return the number of entries of the row axis in so many bytes: at least one, at most all; one where rows of
        another parameter come after those of each.
        """
        if self.written[0].half is not None:
            return 1
        return min(self.rows, max(1, most_bytes * self.rows // max(1, self.nbytes)))

    def to_stored(self, block: np.ndarray) -> np.ndarray:
        """Convert some entries of the row axis of this layer's parameter, with all of the other axes, to stored rows.

        Args:
            block: The values, with the axes of the parameter in their order.
        """
        axes = self.parameter.axes
        sizes = self.parameter.sizes | {self.row_axis: block.shape[axes.index(self.row_axis)]}
        return self.parameter.stored.to_stored(block.astype(self.dtype, copy=False), axes, sizes)


def saved_tensors(model: LlamaLMHeadModel, dtype: Any, vocab_size: int) -> list[SavedTensor]:
    """Return all tensors of a checkpoint by layer, so that those of a layer are in one file where possible.

    Args:
        dtype: The dtype of the stored tensors; None keeps that of each parameter.
        vocab_size: The number of rows of the vocabulary that are stored.
    """
    family = family_of(model.config)
    tensors = [
        SavedTensor(
            parameter=parameter,
            layer=layer,
            dtype=np.dtype(parameter.value.array.dtype if dtype is None else dtype),
            vocab_size=vocab_size,
            packed=family.packed_experts,
        )
        for parameter in parameters(model, family.tensors)
        for layer in parameter.layers
    ]
    first = {tensor.written[0].name: place for place, tensor in reversed(list(enumerate(tensors)))}

    def place(tensor: SavedTensor) -> tuple[int, int, int]:
        # The rows of one tensor follow each other.
        stored, before = tensor.written[0], tensor.parameter.first_row
        return -1 if tensor.layer is None else tensor.layer, first[stored.name], stored.half or before

    return sorted(tensors, key=place)


def pieces_of(tensors: Sequence[SavedTensor], most_bytes: int) -> Iterator[tuple[SavedTensor, int, int]]:
    """Yield what is written of a file's tensors, in its order: a tensor, and entries of its row axis from and to."""
    for _, group in itertools.groupby(tensors, key=_first_written):
        parts = [[(tensor, *piece) for piece in tensor.pieces(most_bytes)] for tensor in group]
        in_turns = parts[0][0][0].written[0].half is not None
        yield from itertools.chain.from_iterable(zip(*parts, strict=True) if in_turns else parts)


def _first_written(tensor: SavedTensor) -> str:
    return tensor.written[0].name


def split_into_files(tensors: Sequence[SavedTensor], max_bytes: int, writers: int) -> dict[str, list[SavedTensor]]:
    """Return the tensors of each file by the file's name.

    Args:
        max_bytes: The most bytes of tensors in a file; a larger tensor has a file of its own.
        writers: The number of processes that write; there are about as many files where they are large enough.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    share = total / max(1, min(writers, total // MIN_PART_BYTES))
    groups: list[list[SavedTensor]] = [[]]
    in_group = before = 0
    for _, rows in itertools.groupby(tensors, key=_first_written):
        parts = list(rows)
        nbytes = sum(part.nbytes for part in parts)
        full = in_group + nbytes > max_bytes or before + nbytes / 2 > share * len(groups)
        if groups[-1] and full:
            groups.append([])
            in_group = 0
        groups[-1] += parts
        in_group += nbytes
        before += nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def file_header(tensors: Sequence[SavedTensor]) -> bytes:
    """Return what is in a safetensors file before its tensors (https://github.com/huggingface/safetensors#format)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for _, group in itertools.groupby(tensors, key=_first_written):
        parts = list(group)
        written = parts[0].written
        rows, nbytes = (
            sum(sizes) // len(written) for sizes in zip(*((p.shape[0], p.nbytes) for p in parts), strict=True)
        )
        experts = [] if written[0].expert is None else [parts[0].rows]
        for place in written:
            start, end = end, end + nbytes
            entries[place.name] = {
                "dtype": _DTYPES[parts[0].dtype.name],
                "shape": [*experts, rows // math.prod(experts), *parts[0].shape[1:]],
                "data_offsets": [start, end],
            }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the data begins aligned
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def index_text(files: Mapping[str, Sequence[SavedTensor]]) -> str:
    """Return the content of ``model.safetensors.index.json``."""
    weight_map = {place.name: file for file, group in files.items() for tensor in group for place in tensor.written}
    total = sum(tensor.nbytes for group in files.values() for tensor in group)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
