"""Whether a checkpoint whose configuration ties the output layer to the embedding stores another one all the same."""

import concurrent.futures

import numpy as np

from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.stored_names import EMBED, HEAD

_CHUNK_BYTES = 8 << 20
_THREADS = 8


def has_own_head(files: CheckpointFiles, part: int = 0, parts: int = 1) -> bool:
    """Whether the output layer is stored and has other values than the embedding: transformers 5 then unties them.

    Source: ``transformers/modeling_utils.py``, ``tie_weights``.

    Args:
        files: The checkpoint, opened as tied.
        part: Which of ``parts`` parts of the rows to compare; hosts read one each.
        parts: The number of parts.

    Raises:
        ConfigError: A tensor cannot be read.
    """
    embed, head = files.place(EMBED), files.place(HEAD)
    if embed is None or head is None or embed == head:
        return False
    shape = files.shape(EMBED)
    if files.shape(HEAD) != shape:
        return True
    count = max(1, _CHUNK_BYTES // max(1, files.row_bytes(EMBED)))
    first, last = (shape[0] * number // parts for number in (part, part + 1))

    def differs(start: int) -> bool:
        stop = min(start + count, last)
        rows, head_rows = (files.read(name, start, stop).astype(np.float32) for name in (EMBED, HEAD))
        return not np.array_equal(rows, head_rows)

    with concurrent.futures.ThreadPoolExecutor(_THREADS, "lockstep-head") as pool:
        compared = pool.map(differs, range(first, last, count))
        different = any(compared)
        pool.shutdown(cancel_futures=True)
    return different
