"""The largest capacities that fit a number of bytes."""

import dataclasses
from collections.abc import Callable, Sequence

from lockstep.engine.footprint import Footprint
from lockstep.schedule import ScheduleSizes
from lockstep.types import Request

_GOOD_ENOUGH = 0.9
"""Of the sequences at a time that the smallest prefill would allow; larger prefills are worth the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """What requests ask of the KV cache, in pages of one replica.

    Args:
        longest: of the longest request.
        mean: of a sequence, on average.
        sequences: of all requests together.
        context: positions that a sequence has behind it at half of its answer, on average.
        new_tokens: of the longest answer.
    """

    longest: int
    mean: float
    sequences: int
    context: float
    new_tokens: int

    @classmethod
    def of(cls, requests: Sequence[Request], page_size: int) -> "Demand":
        """Worst cases: every answer as long as it may be."""
        counts = [request.params.n_generations for request in requests]
        lengths = [len(request.prompt_tokens) + request.params.max_new_tokens - 1 for request in requests]
        pages = [-(-length // page_size) for length in lengths]
        middles = [len(request.prompt_tokens) + request.params.max_new_tokens / 2 for request in requests]
        total = sum(counts)
        return cls(
            longest=max(pages),
            mean=sum(n * p for n, p in zip(counts, pages, strict=True)) / total,
            sequences=total,
            context=sum(n * m for n, m in zip(counts, middles, strict=True)) / total,
            new_tokens=max(request.params.max_new_tokens for request in requests),
        )


def fit(
    wanted: ScheduleSizes,
    demand: Demand,
    footprint: Callable[[ScheduleSizes], Footprint],
    budget: int,
    least: ScheduleSizes | None = None,
) -> ScheduleSizes | None:
    """Capacities that need at most ``budget`` bytes: ``wanted`` if it fits, else fewer slots, pages and prefill rows.

    Args:
        wanted: what the requests and the caps ask for.
        demand: of the requests.
        footprint: bytes of given sizes; must grow with each of them, and by the same for every page.
        budget: bytes per device.
        least: slots, pages and prefill rows to have at least.

    Returns:
        The sizes that let most sequences decode at a time; None if not even one sequence fits.
    """
    if footprint(wanted).total <= budget:
        return wanted
    rows, candidates = wanted.prefill_rows, []
    while True:
        best = _most_sequences(dataclasses.replace(wanted, prefill_rows=rows), demand, footprint, budget, least)
        if best is not None:
            candidates.append(best)
        if rows <= (least.prefill_rows if least else 1):
            break
        rows = max(rows // 2, least.prefill_rows if least else 1)
    if not candidates:
        return None
    most = max(_at_a_time(sizes, demand) for sizes in candidates)
    return next(sizes for sizes in candidates if _at_a_time(sizes, demand) >= _GOOD_ENOUGH * most)


def _most_sequences(
    wanted: ScheduleSizes,
    demand: Demand,
    footprint: Callable[[ScheduleSizes], Footprint],
    budget: int,
    least: ScheduleSizes | None,
) -> ScheduleSizes | None:
    """The best number of slots and pages with these prefill rows."""
    fewest = min(wanted.pages, demand.longest + 1)
    if least is not None:
        fewest = max(fewest, least.pages)
    best = None
    for slots in range(wanted.slots, (least.slots if least else 1) - 1, -1):
        sizes = dataclasses.replace(
            wanted, slots=slots, sequences=min(wanted.sequences, slots * len(wanted.working)), pages=fewest
        )
        now = footprint(sizes)
        if now.total > budget:
            continue
        page = now.pool // fewest
        most = max(fewest, min(wanted.pages, slots * wanted.pages_per_sequence + 1))
        room = budget - (now.weights + now.pool + now.temporaries)
        sizes = dataclasses.replace(sizes, pages=min(most, fewest + max(0, room) // max(1, page)))
        if best is None or _at_a_time(sizes, demand) > _at_a_time(best, demand):
            best = sizes
    return best


def _at_a_time(sizes: ScheduleSizes, demand: Demand) -> float:
    """Sequences that all replicas decode at a time, with sequences of average length."""
    return min(float(sizes.sequences), len(sizes.working) * max(1.0, (sizes.pages - 1) / demand.mean))


def waves(sizes: ScheduleSizes, demand: Demand) -> float:
    """How often the requests fill what decodes at a time; at least 1."""
    return max(1.0, demand.sequences / _at_a_time(sizes, demand))
