"""The loop over launches, and the gate before each: whether a host failed since the last one, and whether to go on."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.engine.decoder.build import Programs
from lockstep.engine.decoder.packing import pack
from lockstep.engine.decoder.prefill import unpack_prompt_logprobs
from lockstep.engine.schedule import (
    CopyPagesBatch,
    DecodeBatch,
    DecodeResults,
    PrefillBatch,
    PromptLogprobsBatch,
    Scheduler,
    VerifyBatch,
)
from lockstep.hosts import Hosts
from lockstep.models import DecoderWeights
from lockstep.placement import DecodeMesh, place_argument
from lockstep.placement.device import AroundLaunch, fetch, start_fetch
from lockstep.types import FinishReason

type BetweenLaunches = Callable[[Scheduler], None]
"""Called with the scheduler before each launch; may ``cancel`` sequences or ``abort`` all, the same on every host."""


class Gate:
    """Holds every host before each launch until all can make it; pass it as ``gate`` to `Engine.run`, on every host.

    While nothing is wrong that is one barrier of the coordination service, and nothing in a job of one process. An
    error on any host is raised on all of them, so that none waits in a launch for one that will never make it. The
    leader ends the run by its clock when its time is over, and a signal on any host ends it. A launch is never
    interrupted, so a run can take longer by one launch.

    Args:
        hosts: The hosts, inside a scope that has no other gate.
        max_seconds: The seconds that the run may last, from now on; None for no limit.
        clock: Gives seconds; read on the leader alone.

    Example:
        >>> lockstep.engine.Gate(hosts, max_seconds=60.0).preempted
        False
    """

    def __init__(
        self, hosts: Hosts, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hosts = hosts
        self._clock = clock
        self._end = None if max_seconds is None else clock() + max_seconds
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
        return self._decided(self._hosts.reasons_to_stop("between launches", error, None if done else self._reason()))

    def _decided(self, reasons: set[str]) -> FinishReason | None:
        """The reason that counts of those that processes have; notes it."""
        self.preempted = FinishReason.CANCELLED in reasons
        if self.preempted:
            return FinishReason.CANCELLED
        # A run without a limit ends with all answers, whatever a message says.
        return FinishReason.BUDGET if FinishReason.BUDGET in reasons and self._end is not None else None

    def _reason(self) -> FinishReason | None:
        if self._hosts.preemption.requested():
            return FinishReason.CANCELLED
        over = self._hosts.is_leader and self._end is not None and self._clock() >= self._end
        return FinishReason.BUDGET if over else None


def launch_all(
    programs: Programs,
    weights: DecoderWeights,
    pool: Any,
    scheduler: Scheduler,
    decode_mesh: DecodeMesh,
    *,
    around_launch: AroundLaunch,
    between_launches: BetweenLaunches | None = None,
    gate: Gate | None = None,
) -> Iterator[None]:
    """Launch until all requests are answered; yield after each launch whose results were committed.

    All that can fail on one host alone is done before the gate: a host that is through it launches. Where requests are
    still to come and there is nothing to launch until then, it yields at the gate's pace.

    Args:
        pool: The K/V pool; deleted at the end.
        around_launch: Called with the program's name; its context surrounds a launch and the wait for its result.
        between_launches: Called with the scheduler before each launch.
        gate: What holds every host until all can go on; None where errors stay on their host.
    """
    by_replica = decode_mesh.sharding(decode_mesh.replica_axes or None)
    commit: Callable[[], None] | None = None
    routed: list[Callable[[], None]] = []
    while True:
        batch, error, committed = None, None, commit is not None
        try:
            if commit is not None:
                commit()
            if between_launches is not None:
                between_launches(scheduler)
            batch = scheduler.next_batch()
            given = None if batch is None else place_argument(pack(batch), by_replica)
        except Exception as caught:
            if gate is None:
                raise
            error = caught
        done = batch is None and (error is not None or scheduler.done)
        options = {"idle": True} if batch is None and not done else {}
        if gate is not None and (reason := gate(error, done=done, **options)) is not None:
            scheduler.abort(reason)
            batch, done = None, True
        if committed or options:
            yield
        if done:
            break
        commit = None
        if batch is None:
            continue

        if isinstance(batch, PrefillBatch):
            with around_launch("prefill"):
                pool = programs.prefill(weights, pool, given)
            if scheduler.capacity.routed_experts:
                pool, words = pool
                routed.append(functools.partial(_commit_routed, scheduler, batch, start_fetch(words)))
        elif isinstance(batch, CopyPagesBatch):
            assert programs.copy_pages is not None
            with around_launch("copy_pages"):
                pool = programs.copy_pages(pool, given)
            if scheduler.capacity.routed_experts:
                routed.append(functools.partial(scheduler.commit_routed, batch))
        elif isinstance(batch, PromptLogprobsBatch):
            assert programs.prompt_logprobs is not None
            with around_launch("prompt_logprobs"):
                packed = fetch(programs.prompt_logprobs(weights, pool, given))
            commit = functools.partial(_commit_prompt_logprobs, scheduler, batch, packed)
        else:
            program = programs.verify[batch.width] if isinstance(batch, VerifyBatch) else programs.decode
            with around_launch(f"verify_{batch.width}" if isinstance(batch, VerifyBatch) else "decode"):
                pool, results = program(weights, pool, given)
                fetched = start_fetch(results)
                ahead = _error_of(scheduler.work_ahead)
                packed = fetched()
            commit = functools.partial(_commit, scheduler, batch, packed, ahead, routed)
            routed = []
    pool.delete()


def _commit(
    scheduler: Scheduler,
    batch: DecodeBatch | VerifyBatch,
    packed: np.ndarray,
    ahead: Exception | None,
    routed: Sequence[Callable[[], None]],
) -> None:
    if ahead is not None:
        raise ahead
    for commit in routed:
        commit()
    scheduler.commit(batch, DecodeResults(packed=packed))


def _commit_routed(scheduler: Scheduler, batch: PrefillBatch, words: Callable[[], np.ndarray]) -> None:
    scheduler.commit_routed(batch, words())


def _commit_prompt_logprobs(scheduler: Scheduler, batch: PromptLogprobsBatch, packed: np.ndarray) -> None:
    scheduler.commit_prompt_logprobs(batch, *unpack_prompt_logprobs(packed))


def _error_of(work: Callable[[], None]) -> Exception | None:
    """The error of a piece of work: it is raised where all hosts learn of it."""
    try:
        work()
    except Exception as error:
        return error
    return None
