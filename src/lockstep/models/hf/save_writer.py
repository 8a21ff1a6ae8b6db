"""The writer of a host's part of a checkpoint: rows from the devices of all hosts or from elsewhere, piece by piece."""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.hosts import Hosts, HostThread, Ledger, Phase, Stopped, Watchdog, ready_on_all
from lockstep.models.hf.row_layout import RowGather
from lockstep.models.hf.save_target import SaveTarget
from lockstep.models.hf.saved_tensor import SavedTensor, file_header, pieces_of
from lockstep.placement import place_argument
from lockstep.placement.device import Program, compile_program

PIECE_BYTES = 32 << 20
"""The most bytes of a tensor that are gathered and written at a time, but for a single row that has more."""

type Read = Callable[[SavedTensor, int, int], np.ndarray]
"""The stored rows of some entries of a tensor's row axis, from and to."""


class FileWriter(HostThread):
    """A context manager that writes files in a thread; after the context nothing more is written.

    Args:
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
            for tensor, start, stop in pieces_of(tensors, PIECE_BYTES):
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


class Source:
    """The source of the rows, here a function that the writing thread calls.

    Args:
        read: The function.
    """

    def __init__(self, hosts: Hosts, read: Read) -> None:
        self._hosts, self.read = hosts, read

    def prepare(self) -> None:
        """Get ready, together with the other hosts."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[Phase]:
        """Return the phase in which `advance` is called."""
        return self._hosts.run_on_all(name, "exporting")

    def advance(self, room: bool) -> None:
        """Have rows brought, by launches that all hosts make; ``room`` says whether all of them have room."""

    def wait(self, writer: FileWriter, timeout_s: float) -> tuple[bool, bool]:
        """Wait for some seconds; return whether the writer is done, and whether there is room for more rows."""
        return writer.wait(timeout_s), True

    def close(self) -> None:
        """Have the writing thread wait for nothing any more."""


type Pieces = Sequence[Sequence[tuple[SavedTensor, int, int]]]
"""The share of each host, in its order: by the number of the process, a tensor and entries of its row axis."""


class Gathered(Source):
    """Rows of a sharded model, gathered by programs that every host launches: a piece for each host in its turn."""

    def __init__(self, hosts: Hosts, pieces: Callable[[], Pieces]) -> None:
        self._get_pieces, self._handover = pieces, Handover()
        super().__init__(hosts, self._handover.take)
        self._watchdog = Watchdog(hosts, hosts.timeout_s)
        self._programs: dict[RowGather, Program] = {}
        self._launched_all = False
        self._rounds: Iterator[tuple[tuple[SavedTensor, int, int] | None, ...]] = iter(())

    def prepare(self) -> None:
        pieces = self._get_pieces()
        self._rounds = itertools.zip_longest(*pieces)
        with self._hosts.run_on_all("compile", "saving") as phase:
            first = {RowGather.of(tensor, PIECE_BYTES): tensor for group in pieces for tensor, _, _ in group}
            for number, (gather, tensor) in enumerate(first.items()):
                program = gather_program(gather, tensor.parameter.value.array.dtype, self._hosts.ledger)
                self._programs[gather] = program
                phase.agree({f"{name}, {number}": value for name, value in program.digests.items()})

    def phase(self, name: str) -> contextlib.AbstractContextManager[Phase]:
        return self._hosts.launch_on_all(name)

    def advance(self, room: bool) -> None:
        if not room:
            return
        pieces = next(self._rounds, None)
        self._launched_all = pieces is None
        with ready_on_all(self._hosts, "before a gather"):
            launches = [
                (process, piece[0], *self._program_and_place(*piece))
                for process, piece in enumerate(pieces or ())
                if piece is not None
            ]
        for process, tensor, program, where in launches:
            with self._watchdog.watch(f"gathering {tensor.name}"):
                # Waiting here bounds the devices to one piece that is under way.
                rows = jax.block_until_ready(program(tensor.parameter.value.array, where))
            if process == self._hosts.index:
                self._handover.put(rows)

    def _program_and_place(self, tensor: SavedTensor, start: int, _: int) -> tuple[Program, jax.Array]:
        """The program that gathers a piece, and the argument that says which."""
        gather = RowGather.of(tensor, PIECE_BYTES)
        where = place_argument(np.array([tensor.place or 0, start], np.int32), gather.replicated)
        return self._programs[gather], where

    def wait(self, writer: FileWriter, timeout_s: float) -> tuple[bool, bool]:
        room = self._handover.has_room(timeout_s)
        return writer.wait(timeout_s if self._launched_all else 0.0), room

    def close(self) -> None:
        self._handover.close()


@functools.lru_cache(maxsize=64)
def gather_program(gather: RowGather, dtype: np.dtype[Any], ledger: Ledger) -> Program:
    """Compile a program that gathers rows, once for all saves of a run."""
    shape = tuple(size for _, size in gather.layout.axes)
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=gather.layout.target)
    where = jax.ShapeDtypeStruct((2,), np.int32, sharding=gather.replicated)
    return compile_program(
        "gather_rows",
        gather.gather,
        [array, where],
        mesh=gather.mesh,
        ledger=ledger,
        out_shardings=gather.replicated,
    )
