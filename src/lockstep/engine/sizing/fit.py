"""The largest capacities that fit a number of bytes."""

import dataclasses
from collections.abc import Callable

from lockstep.engine.sizing.demand import Demand
from lockstep.engine.sizing.memory_model import Footprint
from lockstep.schedule import Capacity

_GOOD_ENOUGH = 0.9
"""Of the sequences at a time that the smallest prefill would allow; larger prefills are worth the rest."""


def fit(
    wanted: Capacity,
    demand: Demand,
    footprint: Callable[[Capacity], Footprint],
    budget: int,
    least: Capacity | None = None,
) -> Capacity | None:
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
    wanted: Capacity,
    demand: Demand,
    footprint: Callable[[Capacity], Footprint],
    budget: int,
    least: Capacity | None,
) -> Capacity | None:
    """The best number of slots and pages with these prefill rows."""
    fewest = min(wanted.pages, demand.longest + 1)
    if least is not None:
        fewest = max(fewest, least.pages)
    best = None
    for slots in range(wanted.slots, (least.slots if least else 1) - 1, -1):
        sizes = dataclasses.replace(
            wanted, slots=slots, sequences=min(wanted.sequences, slots * len(wanted.active_replicas)), pages=fewest
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


def _at_a_time(sizes: Capacity, demand: Demand) -> float:
    """Sequences that all replicas decode at a time, with sequences of average length."""
    return min(float(sizes.sequences), len(sizes.active_replicas) * max(1.0, (sizes.pages - 1) / demand.mean))


def waves(sizes: Capacity, demand: Demand) -> float:
    """How often the requests fill what decodes at a time; at least 1."""
    return max(1.0, demand.sequences / _at_a_time(sizes, demand))
