"""A digest that tells checkpoints apart, of pieces of their tensors."""

import bisect
import concurrent.futures
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping

from lockstep.errors import ConfigError
from lockstep.models.hf.files import CONFIG_NAME, CheckpointFiles, check_is_model, files_in, read_heads
from lockstep.models.hf.tensor_file import TensorFile
from lockstep.urls import url_to_fs

_THREADS = 16
_PIECES = 32
"""Pieces of each kind of tensor: every layer of a model of 32 has one, and a bucket has a few hundred requests."""
_PIECE_BYTES = 4 << 10


def fingerprint(checkpoint: str) -> str:
    """Return a digest that differs between checkpoints: of names and pieces of their tensors, not of age or place.

    The headers are read, and pieces of 4 KiB of every kind of tensor (the ``q_proj`` of all layers are one), from the
    first of them to the last, so that it takes seconds for a checkpoint of any size. Training changes all of some kind,
    also where it is a merged adapter's.

    Raises:
        ConfigError: There is no config.json with safetensors.
    """
    directory = os.path.expanduser(checkpoint)
    filesystem, root = url_to_fs(directory)
    present = files_in(filesystem, root.rstrip("/"))
    check_is_model(checkpoint, present)
    if CONFIG_NAME not in present or not any(name.endswith(".safetensors") for name in present):
        raise ConfigError(
            f"{checkpoint} has no config.json with safetensors beside it. Give the directory of a Hugging Face "
            "checkpoint (transformers: save_pretrained); the checkpoint of a training run is a checkpoint_path."
        )
    heads = read_heads(directory)
    files = CheckpointFiles(directory, heads)
    total = hashlib.sha256(heads[CONFIG_NAME])
    for name in sorted(files.opened):
        total.update(f"\n{name}\n".encode() + heads[name])
    with concurrent.futures.ThreadPoolExecutor(_THREADS, "lockstep-fingerprint") as pool:
        for data in pool.map(lambda place: place[0].read_bytes(*place[1:], _PIECE_BYTES), _pieces(files.opened)):
            total.update(data)
    return total.hexdigest()


def _pieces(files: Mapping[str, TensorFile]) -> Iterator[tuple[TensorFile, str, int]]:
    """The places of pieces, evenly all through the tensors of each kind, one after the other: file, tensor, byte."""
    kinds: dict[str, list[tuple[int, str, str]]] = {}
    for file in files:
        for name in files[file].names:
            kinds.setdefault(re.sub(r"\d+", "#", name), []).append((len(name), name, file))  # layer 2 before 10
    for _, tensors in sorted(kinds.items()):
        tensors.sort()
        ends = list(itertools.accumulate(files[file].stored_bytes(name) for _, name, file in tensors))
        places: dict[tuple[int, int], None] = {}
        for piece in range(_PIECES if ends[-1] else 0):
            place = (ends[-1] - 1) * piece // (_PIECES - 1)
            number = bisect.bisect_right(ends, place)
            start = ends[number - 1] if number else 0
            places[number, (place - start) // _PIECE_BYTES] = None
        yield from ((files[tensors[number][2]], tensors[number][1], piece * _PIECE_BYTES) for number, piece in places)
