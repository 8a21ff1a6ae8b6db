"""The largest capacity that fits a number of bytes."""

import dataclasses
from collections.abc import Callable

from lockstep.engine.schedule import Capacity
from lockstep.engine.sizing.demand import Demand
from lockstep.engine.sizing.memory_model import Footprint

_GOOD_ENOUGH = 0.9
"""The share of the sequences that the smallest prefill would allow at a time; larger prefills are worth the rest."""


def fit(
    wanted: Capacity,
    demand: Demand,
    footprint: Callable[[Capacity], Footprint],
    budget: int,
    least: Capacity | None = None,
    max_rows: int | None = None,
) -> Capacity | None:
    """The capacity that needs at most ``budget`` bytes: ``wanted``, or one with fewer slots, pages and prefill rows.

    Args:
        wanted: What the requests and the caps ask for.
        demand: What the requests ask of the KV cache.
        footprint: Gives the bytes of a capacity; must grow with each of its numbers, and by the same for every page.
        budget: Bytes per device.
        least: The least slots, pages and prefill rows to have.
        max_rows: The most rows of a page table; None for no limit.

    Returns:
        The capacity that lets most sequences decode at a time; None if not even one sequence fits.
    """
    if footprint(wanted).total <= budget and tables_fit(wanted, max_rows):
        return wanted
    if max_rows is not None:
        wanted = dataclasses.replace(
            wanted.with_slots(min(wanted.slots, max_rows)), prefill_rows=min(wanted.prefill_rows, max_rows)
        )
    rows, candidates = wanted.prefill_rows, []
    while True:
        found = _most_sequences(dataclasses.replace(wanted, prefill_rows=rows), demand, footprint, budget, least)
        if found is not None:
            candidates.append(found)
        if rows <= (least.prefill_rows if least else 1):
            break
        rows = max(rows // 2, least.prefill_rows if least else 1)
    if not candidates:
        return None
    best = max(concurrent_sequences(sizes, demand) for sizes in candidates)
    return next(sizes for sizes in candidates if concurrent_sequences(sizes, demand) >= _GOOD_ENOUGH * best)


def tables_fit(sizes: Capacity, max_rows: int | None) -> bool:
    """Whether the page tables of decode and prefill launches have at most ``max_rows`` rows; None is no limit."""
    return max_rows is None or max(sizes.slots, sizes.prefill_rows) <= max_rows


def _most_sequences(
    wanted: Capacity,
    demand: Demand,
    footprint: Callable[[Capacity], Footprint],
    budget: int,
    least: Capacity | None,
) -> Capacity | None:
    """The best number of slots and pages with the prefill rows of ``wanted``."""
    fewest = min(wanted.pages, demand.longest + 1)
    if least is not None:
        fewest = max(fewest, least.pages)
    best = None
    for slots in range(wanted.slots, (least.slots if least else 1) - 1, -1):
        sizes = dataclasses.replace(wanted.with_slots(slots), pages=fewest)
        now = footprint(sizes)
        if now.total > budget:
            continue
        page = now.pool // fewest
        most = max(fewest, min(wanted.pages, slots * wanted.pages_per_sequence + 1))
        room = budget - (now.weights + now.pool + now.temporaries)
        sizes = dataclasses.replace(sizes, pages=min(most, fewest + max(0, room) // max(1, page)))
        if best is None or concurrent_sequences(sizes, demand) > concurrent_sequences(best, demand):
            best = sizes
    return best


def concurrent_sequences(sizes: Capacity, demand: Demand) -> float:
    """Sequences of average length that all replicas decode at a time."""
    return min(float(sizes.sequences), len(sizes.active_replicas) * max(1.0, (sizes.pages - 1) / demand.mean))


def smallest(wanted: Capacity, longest: int) -> Capacity:
    """The smallest capacity for one sequence of ``longest`` pages."""
    return dataclasses.replace(wanted.with_slots(1), pages=min(wanted.pages, longest + 1), prefill_rows=1)
