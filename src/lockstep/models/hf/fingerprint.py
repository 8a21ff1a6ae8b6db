"""A digest of a Hugging Face checkpoint, without reading all of it."""

import hashlib
import os

from lockstep.errors import ConfigError
from lockstep.urls import url_to_fs

_PIECES_PER_FILE = 16
_PIECE_BYTES = 64 << 10


def fingerprint(checkpoint: str) -> str:
    """Return a digest that differs between checkpoints: of names, sizes and pieces of their files, not of age or place.

    The beginning of each file of weights (with the names and shapes of the tensors) and pieces of 64 KiB all over it
    are read, so that it takes seconds for a checkpoint of any size. Training changes all weights, so every piece
    differs.

    Args:
        checkpoint: A directory or URL of Hugging Face files.

    Returns:
        SHA-256 in hexadecimal digits.

    Raises:
        ConfigError: There is no config.json with safetensors.
    """
    filesystem, root = url_to_fs(os.path.expanduser(checkpoint))
    files = sorted(f for f in filesystem.glob(f"{root.rstrip('/')}/*") if f.endswith((".safetensors", ".json")))
    total = hashlib.sha256()
    weights = [file for file in files if file.endswith(".safetensors")]
    if not weights or f"{root.rstrip('/')}/config.json" not in files:
        raise ConfigError(
            f"{checkpoint} has no config.json with safetensors beside it. Give the directory of a Hugging Face "
            "checkpoint (transformers: save_pretrained); the checkpoint of a training run is a checkpoint_path."
        )
    for file in (f"{root.rstrip('/')}/config.json", *weights):
        size = filesystem.size(file)
        total.update(f"{file.rsplit('/', 1)[-1]} {size}\n".encode())
        starts = sorted({size * piece // _PIECES_PER_FILE for piece in range(_PIECES_PER_FILE)})
        with filesystem.open(file, "rb") as opened:
            for start in starts:
                opened.seek(start)
                total.update(opened.read(_PIECE_BYTES))
    return total.hexdigest()
