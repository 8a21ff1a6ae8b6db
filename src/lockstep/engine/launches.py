"""The loop over launches, and the gate before each: whether a host failed since the last one, and whether to go on."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from lockstep.engine.decoder.build import Programs
from lockstep.engine.decoder.prefill import unpack_prompt_logprobs
from lockstep.engine.schedule import (
    Batch,
    CopyPagesBatch,
    DecodeBatch,
    DecodeResults,
    PrefillBatch,
    PromptLogprobsBatch,
    Scheduler,
    VerifyBatch,
)
from lockstep.hosts import Hosts, Watchdog
from lockstep.models import DecoderWeights
from lockstep.placement import DecodeMesh, place_argument
from lockstep.placement.device import fetch, start_fetch
from lockstep.types import Completion, FinishReason


class Observer:
    """Work of one host while all generate: extend it and override methods. None of them may launch.

    Example:
        >>> class Answers(lockstep.engine.Observer):
        ...     def answered(self, completions):
        ...         print(f"{len(completions)} answered")
        >>> params = lockstep.SamplingParams(max_new_tokens=4)
        >>> asked = lockstep.Request(prompt_id=0, prompt_tokens=(1,), params=params)
        >>> completions = lockstep.Engine(lockstep.EngineConfig(), mesh).generate(model, [asked], observer=Answers())
        1 answered
    """

    def between_launches(self, scheduler: Scheduler) -> None:
        """Look at the scheduler before a launch; may ``cancel`` sequences or ``abort`` all, the same on every host."""

    def answered(self, completions: Sequence[Completion]) -> None:
        """Take completions as soon as their prompts have all of theirs."""


class Gate:
    """The hosts, as an engine's loop knows them: each waits before a launch until all can make it.

    While nothing is wrong that is one barrier of the coordination service, and nothing in a job of one process. An
    error on any host is raised on all of them, so that none waits in a launch for one that will never make it. The
    leader ends the run by its clock when its time is over, and a signal on any host ends it. A launch is never
    interrupted, so a run can take longer by one launch.

    Args:
        hosts: The hosts, inside a scope that has no other gate; None where this host generates by itself: an error
            stays here, and peers that wait for it would do so in the next launch.
        max_seconds: The seconds that the run may last, from now on; None for no limit.
        clock: Gives seconds; read on the leader alone.
        watchdog: What ends the process when a launch outlives its time; None for nothing.
        observer: What this host does between launches; None for nothing.

    Example:
        >>> lockstep.engine.Gate(hosts, max_seconds=60.0).preempted
        False
    """

    def __init__(
        self,
        hosts: Hosts | None = None,
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        watchdog: Watchdog | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._hosts, self._watchdog, self._clock = hosts, watchdog, clock
        self._end = None if max_seconds is None else clock() + max_seconds
        self.observer = Observer() if observer is None else observer
        self.preempted = False
        """Whether the run was aborted because the job is asked to end; the same on every host."""

    def __call__(self, error: Exception | None, *, done: bool = False, idle: bool = False) -> FinishReason | None:
        """Return when every host is here, and why the run ends early; None where it goes on.

        Args:
            error: What went wrong on this host since the last launch, or None.
            done: Whether there is nothing left to launch, so that no time is over and no signal matters.
            idle: Whether there is nothing to launch until further requests come.

        Raises:
            PeerError: Something went wrong on at least one host. The text is the same on every host; a host's own error
                is its cause.
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        reason = None if done else self._reason()
        if self._hosts is not None:
            return self._decided(self._hosts.reasons_to_stop("between launches", error, reason))
        if error is not None:
            raise error
        return self._decided(set() if reason is None else {reason})

    def launch(self, program: str) -> contextlib.AbstractContextManager[object]:
        """Surround a launch and, where the host waits for it, its result.

        Args:
            program: Its name, which other hosts read when they wait in vain.
        """
        return contextlib.nullcontext() if self._watchdog is None else self._watchdog.watch_launch(program)

    def _decided(self, reasons: set[str]) -> FinishReason | None:
        """The reason that counts of those that processes have; notes it."""
        self.preempted = FinishReason.CANCELLED in reasons
        if self.preempted:
            return FinishReason.CANCELLED
        # A run without a limit ends with all answers, whatever a message says.
        return FinishReason.BUDGET if FinishReason.BUDGET in reasons and self._end is not None else None

    def _reason(self) -> FinishReason | None:
        if self._hosts is not None and self._hosts.preemption.requested():
            return FinishReason.CANCELLED
        leads = self._hosts is None or self._hosts.is_leader
        return FinishReason.BUDGET if leads and self._end is not None and self._clock() >= self._end else None


def launch_all(devices: "Devices", scheduler: Scheduler, gate: Gate) -> Iterator[None]:
    """Launch until all requests are answered; yield after each launch whose results were committed.

    All that can fail on one host alone is done before the gate: a host that is through it launches. Where requests are
    still to come and there is nothing to launch until then, it yields at the gate's pace.
    """
    while True:
        results, batch, argument, error = devices.take_results(), None, None, None
        try:
            for commit in results:
                commit()
            gate.observer.between_launches(scheduler)
            if (batch := scheduler.next_batch()) is not None:
                argument = place_argument(batch.packed(), devices.by_replica)
        except Exception as caught:
            error = caught
        done = batch is None and (error is not None or scheduler.done)
        idle = batch is None and not done
        if (reason := gate(error, done=done, idle=idle)) is not None:
            scheduler.abort(reason)
            batch, done = None, True
        if results or idle:
            yield
        if done:
            break
        if batch is not None:
            devices.launch(batch, argument, scheduler, gate)
    devices.close()


class Devices:
    """A generation on the devices: programs, weights, the K/V pool, and results that the scheduler does not have yet.

    An error that outlives the generation keeps the arguments of the functions that it came through, so none that can
    fail on one host alone is a method here: what it raises is raised on all hosts, and the pool has to be free by then.

    Args:
        pool: The K/V pool; every launch takes it and leaves another.
    """

    def __init__(self, programs: Programs, weights: DecoderWeights, pool: Any, decode_mesh: DecodeMesh) -> None:
        self._programs, self._weights, self._pool = programs, weights, pool
        self.by_replica = decode_mesh.sharding(decode_mesh.replica_axes or None)
        """The placement of the arguments of launches."""
        self._results: list[Callable[[], None]] = []  # what commits them, in the order of the launches
        self._decides = False  # whether the last of them decides about the next launch

    def take_results(self) -> list[Callable[[], None]]:
        """Return what commits the results so far, once those are there that decide about the next launch."""
        results, self._results = (self._results, []) if self._decides else ([], self._results)
        self._decides = False
        return results

    def launch(self, batch: Batch, argument: Any, scheduler: Scheduler, gate: Gate) -> None:
        """Launch the program of a batch, and wait for results that decide about the next launch."""
        programs, weights = self._programs, self._weights
        match batch:
            case PrefillBatch():
                with gate.launch("prefill"):
                    self._pool, words = programs.prefill(weights, self._pool, argument)
                if words is not None:
                    experts = start_fetch(words)
                    self._results.append(lambda: scheduler.commit_routed(batch, experts()))
            case CopyPagesBatch():
                assert programs.copy_pages is not None
                with gate.launch("copy_pages"):
                    self._pool = programs.copy_pages(self._pool, argument)
                if scheduler.capacity.routed_experts:
                    self._results.append(lambda: scheduler.commit_routed(batch))
            case PromptLogprobsBatch():
                assert programs.prompt_logprobs is not None
                with gate.launch("prompt_logprobs"):
                    packed = fetch(programs.prompt_logprobs(weights, self._pool, argument))
                self._results.append(lambda: scheduler.commit_prompt_logprobs(batch, *unpack_prompt_logprobs(packed)))
                self._decides = True
            case DecodeBatch() | VerifyBatch():
                self._sample(batch, argument, scheduler, gate)

    def _sample(self, batch: DecodeBatch | VerifyBatch, argument: Any, scheduler: Scheduler, gate: Gate) -> None:
        name, program = "decode", self._programs.decode
        if isinstance(batch, VerifyBatch):
            name, program = f"verify_{batch.width}", self._programs.verify[batch.width]
        with gate.launch(name):
            self._pool, results = program(self._weights, self._pool, argument)
            fetched = start_fetch(results)
            ahead = _error_of(scheduler.work_ahead)
            packed = fetched()

        def commit() -> None:
            if ahead is not None:
                raise ahead
            scheduler.commit(batch, DecodeResults(packed=packed))

        self._results.append(commit)
        self._decides = True

    def close(self) -> None:
        """Free the pool."""
        for array in jax.tree.leaves(self._pool):
            array.delete()


def _error_of(work: Callable[[], None]) -> Exception | None:
    """The error of a piece of work: it is raised where all hosts learn of it."""
    try:
        work()
    except Exception as error:
        return error
    return None
