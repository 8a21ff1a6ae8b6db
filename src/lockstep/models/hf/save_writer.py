"""The thread of one host that writes its files of a checkpoint, piece by piece, while the hosts stay in touch."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from lockstep.errors import HostTimeoutError
from lockstep.models.hf.save_plan import SavedTensor, file_header
from lockstep.models.hf.save_target import SaveTarget

PIECE_BYTES = 32 << 20
"""The most bytes of a tensor that are gathered and written at a time, but for a single row that has more."""

STOP_S = 5.0
"""Seconds that a write under way has to end when a save is given up."""

type Read = Callable[[SavedTensor, int, int], np.ndarray]
"""Returns the stored rows of some entries of a tensor's row axis, from and to."""


class Stopped(Exception):
    """The save was given up; nobody sees this but the thread."""


class FileWriter:
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
        self._target, self._files, self._read, self._timeout_s = target, files, read, timeout_s
        self.nbytes = sum(tensor.nbytes for group in files.values() for tensor in group)
        """The bytes that this host writes in all."""
        self.written = 0
        """The bytes that it has written."""
        self._changed = threading.Condition()
        self._done = self._stopped = False
        self._error: BaseException | None = None
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lockstep-save", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Have the thread end after the piece that it is at."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(STOP_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all files are written, or for some seconds.

        Returns:
            Whether they are.

        Raises:
            HostTimeoutError: Nothing was written for the writer's ``timeout_s``.
            Exception: What reading or writing raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            if not self._done and time.monotonic() - self._last > self._timeout_s:
                raise HostTimeoutError(
                    f"nothing of the checkpoint was written for {self._timeout_s:g} s. Check the disk, or the network "
                    "and the access to the bucket, or raise timeout_s."
                )
            return self._done

    def _run(self) -> None:
        try:
            with jax.no_execution(True):
                for name, tensors in self._files.items():
                    self._write(name, tensors)
        except Stopped:
            return
        except BaseException as error:
            self._error = error
        with self._changed:
            self._done = self._error is None
            self._changed.notify_all()

    def _write(self, name: str, tensors: Sequence[SavedTensor]) -> None:
        with self._target.create(name) as file:
            file.write(file_header(tensors))
            for tensor in tensors:
                for start, stop in tensor.pieces(PIECE_BYTES):
                    if self._stopped:
                        raise Stopped
                    rows = self._read(tensor, start, stop)
                    file.write(_as_bytes(rows))
                    self._last = time.monotonic()
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
