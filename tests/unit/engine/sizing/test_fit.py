"""The largest capacity that fits."""

import itertools

import pytest

from lockstep.engine import EngineConfig
from lockstep.engine.schedule import Capacity
from lockstep.engine.sizing.demand import Demand, desired_capacity
from lockstep.engine.sizing.fit import fit
from lockstep.engine.sizing.memory_model import Footprint
from tests.unit.engine.models import request
from tests.unit.engine.schedule.test_scheduler import capacity_of
from tests.unit.engine.sizing.made_up import models_on


def test_fit_is_the_best_of_all_slots_and_pages() -> None:
    config = EngineConfig(page_size=8, max_prefill_size=8)
    demand = Demand.of([request(0, 40, 8), *(request(i, 5, 4) for i in range(1, 20))], 8)
    wanted = desired_capacity(config, models_on(config)[{"tensor": 2}], demand)

    def bytes_of(sizes: Capacity) -> Footprint:
        return Footprint(weights=100, pool=10 * sizes.pages, reshard=0, temporaries=35 * sizes.slots)

    def at_a_time(slots: int, pages: int) -> float:
        return min(20.0, slots * 2.0, 2 * (pages - 1) / demand.mean)

    for budget in range(100, 1100, 37):
        every = [
            at_a_time(slots, pages)
            for slots, pages in itertools.product(range(1, wanted.slots + 1), range(demand.longest + 1, 100))
            if 100 + 10 * pages + 35 * slots <= budget
        ]
        got = fit(wanted, demand, bytes_of, budget)
        assert (got is None) == (not every)
        if got is not None:
            assert bytes_of(got).total <= budget
            assert min(at_a_time(got.slots, got.pages), 20.0) == pytest.approx(max(every))


def test_a_larger_prefill_may_cost_a_tenth_of_the_sequences() -> None:
    wanted = capacity_of(slots=100, sequences=100, pages=101, pages_per_sequence=1, prefill_rows=8)
    demand = Demand.of([request(0, 1, 1, n_generations=100)], 2)

    def bytes_of(sizes: Capacity) -> Footprint:
        return Footprint(weights=0, pool=sizes.pages, reshard=0, temporaries=4 * sizes.prefill_rows)

    # Pages that are left beside a prefill of 8, 4, 2 and 1 rows, the null page too: 59, 75, 83, 87.
    got = fit(wanted, demand, bytes_of, 91)
    assert got is not None and (got.prefill_rows, got.pages) == (2, 83)


def test_what_fits_is_left_as_it_is_wanted() -> None:
    wanted = capacity_of(prefill_rows=8)
    demand = Demand.of([request(0, 1, 1, n_generations=100)], 2)
    assert fit(wanted, demand, lambda sizes: Footprint(weights=1, pool=1, reshard=0, temporaries=1), 3) is wanted


def test_no_page_table_has_more_rows_than_it_may() -> None:
    wanted = capacity_of(slots=100, sequences=100, pages=101, pages_per_sequence=1, prefill_rows=80)
    demand = Demand.of([request(0, 1, 1, n_generations=100)], 2)

    def bytes_of(sizes: Capacity) -> Footprint:
        return Footprint(weights=0, pool=sizes.pages, reshard=0, temporaries=0)

    roomy = fit(wanted, demand, bytes_of, 1000, max_rows=60)
    assert roomy is not None and (roomy.slots, roomy.sequences, roomy.prefill_rows) == (60, 60, 60)
    tight = fit(wanted, demand, bytes_of, 31, max_rows=60)
    assert tight is not None and (tight.pages, tight.prefill_rows) == (31, 60)
    assert fit(wanted, demand, bytes_of, 1000, max_rows=100) is wanted
