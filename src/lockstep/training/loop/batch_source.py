"""The batches of the train step: read ahead in a thread, placed on the devices while the step before runs."""

import concurrent.futures
import functools
import math
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from lockstep.errors import HostTimeoutError
from lockstep.exits import give_work_up
from lockstep.hosts import Hosts, Terminated
from lockstep.models import join_trained, split_trained
from lockstep.placement import batch_spec, host_rows, place_local
from lockstep.printable import get_logger
from lockstep.training.data.rows import Batches, BatchesOfLengths
from lockstep.training.loop.logprobs import ReferenceLogprobs
from lockstep.training.objectives import REFERENCE
from lockstep.training.step.programs import Programs
from lockstep.training.step.renewal import reference_of
from lockstep.training.step.train_state import TrainState

log = get_logger(__name__)

LOOK_S = 0.5  # seconds between two looks for a signal of a process that waits for its rows
ROWS_S = 5.0  # seconds after a signal in which rows may come, whose step then ends the run in order
MEET_S = 3.0  # seconds after them in which the others have waited as long, where they are not in the step
CLOSE_S = 2.0  # seconds that the end of a run waits for a read under way
AHEAD = 2  # the number of batches that are read beyond the one in use: one is placed during a step, one is read


@runtime_checkable
class BatchSource(Protocol):
    """Gives a training loop its batches as global arrays. Every host makes the same calls, from the main thread."""

    def structs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return global shape, type and sharding of each column, for which the train step is compiled."""
        ...

    def batch(self, step: int, model: PyTree) -> Mapping[str, jax.Array] | None:
        """Return the batch of a step; what takes time here, the devices wait for. A source may launch programs to make
        it, the same on every host.

        Args:
            step: The 0-based step.
            model: The parameters before this step. They are donated to it: nothing may keep them.

        Returns:
            Global arrays by column; None where the job is asked to end before there is a batch, on every host.
        """
        ...

    def prepare(self, step: int) -> None:
        """Do what can be done for a later step while the devices run the one before. Launches nothing."""
        ...

    def close(self) -> None:
        """End what runs in the background."""
        ...


@runtime_checkable
class PackedBatches(Protocol):
    """A `BatchSource` whose batches have ``segment_ids`` and end, on each device, in rows without tokens: how many
    differs from step to step, and the train step leaves them out.
    """

    @property
    def filled_rows(self) -> int:
        """The number of rows of the last batch that have tokens."""
        ...


@runtime_checkable
class UsesReference(Protocol):
    """A `BatchSource` whose batches depend on a reference model, which the state of the optimizer may keep."""

    def use_reference(self, model: PyTree) -> None:
        """Take the reference model for batches until the next call, before which a step donates it."""
        ...


def give_reference(source: BatchSource, state: TrainState) -> None:
    """Give a source the reference model that the state of an optimizer keeps, where there is one; launches nothing."""
    if isinstance(source, UsesReference) and (kept := reference_of(state.opt_state)) is not None:
        source.use_reference(join_trained(kept, split_trained(state.model)[1]))


class BatchFeed:
    """The batches of data that do not depend on the model, each host reading only its own rows.

    One thread reads, so that ``batches`` sees one call at a time, and it only reads: a launch there raises. Arrays are
    placed from the main thread, which launches what a reference model adds and nothing else.
    """

    def __init__(
        self,
        batches: Batches,
        n_rows: int,
        mesh: Mesh,
        *,
        first: int,
        last: int,
        hosts: Hosts,
        reference: ReferenceLogprobs | None = None,
    ) -> None:
        self._hosts = hosts
        self._batches, self._n_rows, self._last, self._reference = batches, n_rows, last, reference
        self._sharding = NamedSharding(mesh, batch_spec(mesh))
        self._rows = host_rows(self._sharding, n_rows)
        self._reads: dict[int, concurrent.futures.Future[Mapping[str, np.ndarray]]] = {}
        self._placed: dict[int, dict[str, jax.Array]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lockstep-batches")
        self._first = first
        self._read_ahead(first)

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return global shape, type and sharding of each column of the largest batch, see `BatchSource.structs`."""
        return self.all_structs()[-1]

    def all_structs(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Return the same for the batches of each length, ascending."""
        if (local := self._rows_of(self._first)) is None:
            raise self._interruption(self._first)
        lengths: Sequence[int | None] = [None]
        if isinstance(self._batches, BatchesOfLengths):
            lengths = self._batches.lengths
        # A number for each sequence, as `REFERENCE` of pairs has it, has no axis of positions.
        axes = max(rows.ndim for rows in local.values())
        by_length = [
            {name: self._struct(rows, length if rows.ndim == axes else None) for name, rows in local.items()}
            for length in lengths
        ]
        return by_length if self._reference is None else [self._reference.structs(structs) for structs in by_length]

    def compile(self, programs: Programs, model: PyTree) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Compile what adds a column, and return `all_structs`; every host makes this call.

        Args:
            model: The model that learns.
        """
        by_length = self.all_structs()
        if self._reference is not None:
            for structs in by_length:
                programs.compile_on_all(REFERENCE, functools.partial(self._reference.compile, model, structs))
        return by_length

    def batch(self, step: int, model: PyTree) -> dict[str, jax.Array] | None:
        """Return the batch of a step, see `BatchSource.batch`.

        Raises:
            SystemExit, KeyboardInterrupt: This process is asked to end before it has its rows, and others are in the
                step, where they wait for it.
        """
        self._read_ahead(step)
        if step not in self._placed:
            if self._rows_of(step) is None:
                return None
            self._place(step)
        batch = self._placed.pop(step)
        return batch if self._reference is None else self._reference.add_to(model, batch, step)

    def use_reference(self, model: PyTree) -> None:
        """See `UsesReference.use_reference`."""
        if self._reference is not None:
            self._reference.use(model)

    def prepare(self, step: int) -> None:
        """Place the batch of a step where it is read already; never waits."""
        read = self._reads.get(step)
        # What is not read yet is placed by `batch`, so that its time counts as waiting for data.
        if read is not None and read.done():
            self._place(step)

    def close(self) -> None:
        """End the thread; one that waits for storage is left behind."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        reads = [read for read in self._reads.values() if read.running()]
        if concurrent.futures.wait(reads, CLOSE_S).not_done:
            give_work_up(lambda: all(read.done() for read in reads))
        else:
            self._thread.shutdown(wait=True)

    def _rows_of(self, step: int) -> Mapping[str, np.ndarray] | None:
        """This host's rows of a step; None on every host where one is asked to end while all wait for theirs."""
        preemption, read, asked = self._hosts.preemption, self._reading(step), math.inf
        while not read.done() and not concurrent.futures.wait([read], LOOK_S).done:
            if asked == math.inf and preemption.signal is not None:
                preemption.tell()
            if preemption.signal is not None or preemption.is_told():
                asked = min(asked, time.monotonic())
            if asked < math.inf and (self._hosts.count == 1 or time.monotonic() - asked > ROWS_S):
                self._meet(step)
                return None
        return read.result()

    def _meet(self, step: int) -> None:
        if self._hosts.count > 1:
            try:
                with self._hosts.scope("without rows", MEET_S) as scope:
                    scope.barrier(f"step {step}")
            except HostTimeoutError:
                # Theirs is donated to a step that cannot end without these rows: no whole state is left in the job.
                log.warning(
                    "the rows of step %d do not come, and other processes are inside that step, which has taken the "
                    "state before it: nothing is saved, and the run goes on from its last checkpoint",
                    step + 1,
                )
                raise self._interruption(step) from None

    def _interruption(self, step: int) -> BaseException:
        number, phase = self._hosts.preemption.signal, f"waiting for the rows of step {step + 1}"
        if number == signal.SIGINT:
            return KeyboardInterrupt()
        if number is None:
            return Terminated(f"{phase}, after a signal to another process")
        return Terminated(phase, number)

    def _struct(self, rows: np.ndarray, length: int | None) -> jax.ShapeDtypeStruct:
        shape = rows.shape[1:] if length is None else (*rows.shape[1:-1], length)
        return jax.ShapeDtypeStruct((self._n_rows, *shape), rows.dtype, sharding=self._sharding)

    def _place(self, step: int) -> None:
        local = self._reads[step].result()
        self._placed[step] = {name: place_local(rows, self._sharding, self._n_rows) for name, rows in local.items()}
        del self._reads[step]

    def _read_ahead(self, step: int) -> None:
        for number in range(step, min(step + AHEAD + 1, self._last)):
            if number not in self._placed:
                self._reading(number)

    def _reading(self, step: int) -> "concurrent.futures.Future[Mapping[str, np.ndarray]]":
        if step not in self._reads:
            self._reads[step] = self._thread.submit(self._read, step)
        return self._reads[step]

    def _read(self, step: int) -> Mapping[str, Any]:
        with jax.no_execution(True):
            return self._batches.batch(step, self._n_rows, self._rows)
