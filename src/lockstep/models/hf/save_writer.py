"""The thread of one host that writes its files of a checkpoint, piece by piece, while the hosts stay in touch."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.hosts import HostThread, Stopped
from lockstep.models.hf.save_plan import SavedTensor, file_header
from lockstep.models.hf.save_target import SaveTarget

PIECE_BYTES = 32 << 20
"""The most bytes of a tensor that are gathered and written at a time, but for a single row that has more."""

type Read = Callable[[SavedTensor, int, int], np.ndarray]
"""Returns the stored rows of some entries of a tensor's row axis, from and to."""


class FileWriter(HostThread):
    """A context manager that writes files in a thread; after the context nothing more is written.

    Args:
        target: Where to write.
        files: The tensors of each file of this host.
        read: What gives the rows; called in the thread, in the order of the files.
        timeout_s: The seconds in which a piece must be read and written.
    """

    def __init__(
        self, target: SaveTarget, files: Mapping[str, Sequence[SavedTensor]], read: Read, timeout_s: float
    ) -> None:
        super().__init__("lockstep-save", timeout_s)
        self._target, self._files, self._read = target, files, read
        self.nbytes = sum(tensor.nbytes for group in files.values() for tensor in group)
        """The bytes that this host writes in all."""
        self.written = 0
        """The bytes that it has written."""

    def _work(self) -> None:
        with jax.no_execution(True):
            for name, tensors in self._files.items():
                self._write(name, tensors)

    def _stall(self) -> str:
        return "nothing of the checkpoint was written"

    def _write(self, name: str, tensors: Sequence[SavedTensor]) -> None:
        with self._target.create(name) as file:
            file.write(file_header(tensors))
            for tensor in tensors:
                for start, stop in tensor.pieces(PIECE_BYTES):
                    self._raise_if_stopped()
                    rows = self._read(tensor, start, stop)
                    file.write(_as_bytes(rows))
                    self._end_step()
                    self.written += rows.nbytes


class Handover:
    """Passes pieces of arrays from the thread that launches programs to the one that writes; holds two at most."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: list[jax.Array] = []
        self._closed = False

    def has_room(self, timeout_s: float) -> bool:
        """Wait for some seconds for room for a piece; return whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._pieces) < 2, timeout_s)

    def put(self, piece: jax.Array) -> None:
        """Pass a piece; there must be room."""
        with self._changed:
            assert len(self._pieces) < 2, "has_room() comes first"
            self._pieces.append(piece)
            self._changed.notify_all()

    def take(self, tensor: SavedTensor, start: int, stop: int) -> np.ndarray:
        """Wait for the next piece and return its rows; see `Read`.

        Raises:
            Stopped: None will come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._closed)
            if self._closed:
                raise Stopped
            piece = self._pieces.pop(0)
            self._changed.notify_all()
        rows = np.asarray(piece.addressable_data(0))
        return rows[: rows.shape[0] * (stop - start) // tensor.rows_in(PIECE_BYTES)]

    def close(self) -> None:
        """Have `take` raise from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _as_bytes(rows: np.ndarray) -> Any:
    """The bytes of a contiguous array, without a copy."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data
