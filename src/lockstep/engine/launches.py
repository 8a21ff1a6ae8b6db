"""The loop over launches: what the host does between two of them, and what it does while the devices work."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lockstep.engine.decoder.arguments import pack
from lockstep.engine.decoder.build import Programs
from lockstep.engine.decoder.prompt_logprobs import unpack_prompt_logprobs
from lockstep.engine.gate import Gate
from lockstep.engine.schedule import (
    CopyPagesBatch,
    DecodeBatch,
    DecodeResults,
    PrefillBatch,
    PromptLogprobsBatch,
    Scheduler,
    VerifyBatch,
)
from lockstep.models import DecoderWeights
from lockstep.placement import DecodeMesh, place_argument
from lockstep.placement.device import AroundLaunch, fetch, start_fetch

type BetweenLaunches = Callable[[Scheduler], None]
"""Called with the scheduler before each launch; may ``cancel`` sequences or ``abort`` all, the same on every host."""


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
    """Launches until all requests are answered; yields after each launch whose results were committed.

    All that can fail on one host alone is done before the gate: a host that is through it launches.

    Args:
        programs: The programs.
        weights: The weights in the decode layout.
        pool: The K/V pool; deleted at the end.
        scheduler: The scheduler of the requests.
        decode_mesh: The decode mesh.
        around_launch: Called with the program's name; its context surrounds a launch and the wait for its result.
        between_launches: Called with the scheduler before each launch.
        gate: What holds every host until all can go on; None where errors stay on their host.
    """
    by_replica = decode_mesh.sharding(decode_mesh.replica_axes or None)
    commit: Callable[[], None] | None = None
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
        if gate is not None and (reason := gate(error, done=batch is None)) is not None:
            scheduler.abort(reason)
            batch = None
        if committed:
            yield
        if batch is None:
            break

        commit = None
        if isinstance(batch, PrefillBatch):
            with around_launch("prefill"):
                pool = programs.prefill(weights, pool, given)
        elif isinstance(batch, CopyPagesBatch):
            assert programs.copy_pages is not None
            with around_launch("copy_pages"):
                pool = programs.copy_pages(pool, given)
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
            commit = functools.partial(_commit, scheduler, batch, packed, ahead)
    pool.delete()


def _commit(
    scheduler: Scheduler, batch: DecodeBatch | VerifyBatch, packed: np.ndarray, ahead: Exception | None
) -> None:
    if ahead is not None:
        raise ahead
    scheduler.commit(batch, DecodeResults(packed=packed))


def _commit_prompt_logprobs(scheduler: Scheduler, batch: PromptLogprobsBatch, packed: np.ndarray) -> None:
    scheduler.commit_prompt_logprobs(batch, *unpack_prompt_logprobs(packed))


def _error_of(work: Callable[[], None]) -> Exception | None:
    """The error of a piece of work: it is raised where all hosts learn of it."""
    try:
        work()
    except Exception as error:
        return error
    return None
