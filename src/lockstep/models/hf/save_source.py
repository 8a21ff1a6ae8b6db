"""Where the rows of a checkpoint that is saved come from: a model on the devices of all hosts, or anything else."""

import abc
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.hosts import Hosts, Ledger, Phase, Watchdog, ready_on_all
from lockstep.models.hf.save_gather import RowGather
from lockstep.models.hf.save_plan import SavedTensor
from lockstep.models.hf.save_writer import PIECE_BYTES, FileWriter, Handover, Read
from lockstep.placement import place_argument
from lockstep.placement.device import Program, compile_program


class Source(abc.ABC):
    """Where the rows come from."""

    read: Read
    """What the writing thread calls."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Get ready, together with the other hosts."""

    @abc.abstractmethod
    def phase(self, name: str) -> contextlib.AbstractContextManager[Phase]:
        """Return the phase in which `advance` is called."""

    @abc.abstractmethod
    def advance(self, room: bool) -> None:
        """Have rows brought, by launches that all hosts make; ``room`` says whether all of them have room."""

    @abc.abstractmethod
    def wait(self, writer: FileWriter, timeout_s: float) -> tuple[bool, bool]:
        """Wait for some seconds; return whether the writer is done, and whether there is room for more rows."""

    def close(self) -> None:  # noqa: B027
        """Have the writing thread wait for nothing any more."""


class Direct(Source):
    """Rows that the writing thread reads by itself."""

    def __init__(self, hosts: Hosts, read: Read) -> None:
        self._hosts, self.read = hosts, read

    def prepare(self) -> None: ...

    def phase(self, name: str) -> contextlib.AbstractContextManager[Phase]:
        return self._hosts.run_on_all(name, "exporting")

    def advance(self, room: bool) -> None: ...

    def wait(self, writer: FileWriter, timeout_s: float) -> tuple[bool, bool]:
        return writer.wait(timeout_s), True


type Pieces = Sequence[Sequence[tuple[SavedTensor, int, int]]]
"""What each host writes, in its order: by the number of the process, a tensor and entries of its row axis."""


class Gathered(Source):
    """Rows of a sharded model, gathered by programs that every host launches: a piece for each host in its turn."""

    def __init__(self, hosts: Hosts, pieces: Callable[[], Pieces]) -> None:
        self._hosts, self._get_pieces = hosts, pieces
        self._handover = Handover()
        self.read = self._handover.take
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
        """What gathers a piece, and the argument that says which."""
        gather = RowGather.of(tensor, PIECE_BYTES)
        where = place_argument(np.array([tensor.layer or 0, start], np.int32), gather.replicated)
        return self._programs[gather], where

    def wait(self, writer: FileWriter, timeout_s: float) -> tuple[bool, bool]:
        room = self._handover.has_room(timeout_s)
        return writer.wait(timeout_s if self._launched_all else 0.0), room

    def close(self) -> None:
        self._handover.close()


@functools.lru_cache(maxsize=64)
def gather_program(gather: RowGather, dtype: np.dtype[Any], ledger: Ledger) -> Program:
    """Compile a program that gathers rows, once for all saves of a run.

    Args:
        gather: What to gather.
        dtype: The dtype of the parameter.
        ledger: The ledger that records launches.
    """
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
