"""The loop over launches: what the host does between two of them, and what it does while the devices work."""

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.device import AroundLaunch, start_fetch
from lockstep.engine.decoder.arguments import pack
from lockstep.engine.decoder.build import Programs
from lockstep.engine.decoder.prompt_logprobs import unpack_prompt_logprobs
from lockstep.models import DecoderWeights
from lockstep.placement import DecodeMesh, place
from lockstep.schedule import CopyPagesBatch, DecodeResults, PrefillBatch, PromptLogprobsBatch, Scheduler

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
) -> Iterator[None]:
    """Launches until all requests are answered; yields after each launch whose results were committed.

    Args:
        programs: The programs.
        weights: The weights in the decode layout.
        pool: The K/V pool; deleted at the end.
        scheduler: The scheduler of the requests.
        decode_mesh: The decode mesh.
        around_launch: Called with the program's name; its context surrounds a launch and the wait for its result.
        between_launches: Called with the scheduler before each launch.
    """
    by_replica = decode_mesh.sharding(decode_mesh.replica_axes or None)
    while True:
        if between_launches is not None:
            between_launches(scheduler)
        batch = scheduler.next_batch()
        if batch is None:
            break
        given = place(pack(batch), by_replica, given_away=True)
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
                found = start_fetch(programs.prompt_logprobs(weights, pool, given))
                packed = found()
            scheduler.commit_prompt_logprobs(batch, *unpack_prompt_logprobs(packed))
        else:
            with around_launch("decode"):
                pool, results = programs.decode(weights, pool, given)
                found = start_fetch(results)
                scheduler.work_ahead()
                packed = found()
            scheduler.commit(batch, DecodeResults(packed=packed))
            yield
    pool.delete()
