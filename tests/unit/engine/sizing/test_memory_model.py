"""Bytes that are predicted, and those that the compiler finds."""

import dataclasses
import itertools
from typing import Any

import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.decode_model import DecodeModels, Weight
from lockstep.engine.schedule import Capacity
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.demand import Demand, desired_capacity
from lockstep.engine.sizing.memory_model import Footprint, MemoryModel, fit
from lockstep.engine.sizing.result import Sizing
from lockstep.models import Experts, read_decoder
from lockstep.types import SamplingParams
from tests.unit.engine.models import FAMILIES, LLAMA, in_bfloat16, mesh_of, model_on, request
from tests.unit.engine.schedule.test_scheduler import capacity_of
from tests.unit.engine.sizing.made_up import models_on


def choose(free: int, **options: Any) -> Sizing:
    """For a model with heads of 128 numbers and many layers, as large models have."""
    config = dataclasses.replace(LLAMA, head_dim=128, num_layers=16, max_seq_len=4096)
    params = SamplingParams(max_new_tokens=2000)
    requests = [dataclasses.replace(request(i, 64), params=params) for i in range(64)]
    engine = EngineConfig(dtype="bfloat16", **options)
    models = DecodeModels(engine, *read_decoder(model_on("1,1,1", config)), mesh_of("1,1,1"))
    return Chooser(config=engine, models=models, requests=requests, free=free).choose()


def test_the_same_memory_has_twice_the_pages_in_8_bits() -> None:
    roomy = choose(2**40), choose(2**40, kv_cache_dtype="fp8")
    assert roomy[0].sizes == roomy[1].sizes
    assert roomy[1].predicted.pool / roomy[0].predicted.pool == 0.5
    free = roomy[0].predicted.total // 4
    few, many = choose(free), choose(free, kv_cache_dtype="fp8")
    assert few.reasons["max_seqs"][1] == many.reasons["max_seqs"][1] == "memory"
    assert many.sizes.pages > 1.9 * few.sizes.pages and many.predicted.total <= many.budget
    assert "KV cache in float8_e4m3fn" in many.describe() and "KV cache in bfloat16" in few.describe()


@pytest.mark.slow
def test_the_compiler_agrees_about_the_bytes() -> None:
    requests = [request(i, 40, 24) for i in range(32)]
    config = EngineConfig(kv_cache_dtype="fp8", max_steps_per_launch=4, max_prefill_size=64)
    engine = Engine(config, mesh_of("1,1,1"))
    engine.prepare(model_on("1,1,1"), requests)
    sizing = engine.sizing
    assert sizing is not None and sizing.compiled is not None
    pages = LLAMA.num_layers * sizing.sizes.pages
    assert sizing.compiled.pool == sizing.predicted.pool == pages * 16 * 2 * LLAMA.num_kv_heads * 8
    print(sizing.describe())
    assert sizing.compiled.temporaries <= 1.3 * sizing.predicted.temporaries
    for name in ("prefill", "decode"):
        assert engine.programs[name].memory().alias_size_in_bytes == sizing.compiled.pool, f"{name}: in place"


@pytest.mark.slow
@pytest.mark.parametrize("whole", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_the_compiler_agrees_about_the_bytes_of_exact_experts(whole: int) -> None:
    """Parts of each on four devices, or two whole ones on each, which answer 4 times for each of 64 tokens."""
    experts = Experts(num_experts=8, num_experts_per_tok=4, intermediate_dim=16)
    config = dataclasses.replace(
        FAMILIES["experts"], hidden_dim=512, num_layers=1, num_kv_heads=4, numerics="exact", experts=experts
    )
    model, mesh = in_bfloat16(model_on("1,1,4", config)), mesh_of("1,1,4")
    engine_config = EngineConfig(layout={"tensor": 4, "expert": whole}, max_steps_per_launch=2, max_prefill_size=64)
    engine = Engine(engine_config, mesh)
    engine.prepare(model, [request(i, 40, 8) for i in range(64)])
    assert engine.sizing is not None
    found = MemoryModel(DecodeModels(engine_config, *read_decoder(model), mesh)[engine_config.layout])
    predicted, compiled = found.temporaries(engine.sizing.sizes)["decode"], engine.programs["decode"].memory()
    print(predicted, compiled.temp_size_in_bytes)
    gathered = 64 * 4 * 4 * 512 * 4
    assert predicted - gathered < compiled.temp_size_in_bytes <= 1.1 * predicted


def test_weights_move_before_there_is_a_pool() -> None:
    assert Footprint(weights=10, pool=3, reshard=4, temporaries=5).total == 10 + 8
    assert Footprint(weights=10, pool=3, reshard=9, temporaries=5).total == 10 + 9


def test_what_moves_and_what_is_gathered_at_a_time() -> None:
    """Two layers of 260 numbers, 60 of them in one weight and 200 in another, and an embedding of 1,000."""
    embed = Weight(name="embed", layers=0, in_place=False, decode_size=1000, decode_bytes=2000, training_bytes=500)
    q = dataclasses.replace(embed, name="q", layers=2, decode_size=2 * 60, decode_bytes=2 * 120)
    down = dataclasses.replace(q, name="down", decode_size=2 * 200, decode_bytes=2 * 400)
    models = models_on(EngineConfig(dtype="bfloat16"))
    alone, divided = (
        MemoryModel(dataclasses.replace(models[{"tensor": size}], leaves=(embed, q, down), gathered=(embed, q, down)))
        for size in (1, 2)
    )
    assert alone._layer_bytes == 2 * 260
    assert alone._moving == 2 * 204, "2 % more than the largest weight of a layer"
    assert divided._moving == 34 * 2 * 260 // 10
    assert alone._gathered_layers == 2 * (120 + 400), "one in use, the next on its way"
    assert alone._gathered_outer == alone._gathered_at_once == 2000
    layers = MemoryModel(dataclasses.replace(alone.model, gathered=(q, down)))
    assert (layers._gathered_outer, layers._gathered_at_once) == (0, 2 * (120 + 400))


def test_where_weights_of_8_bits_are_widened_every_program_has_a_layer_of_them_more() -> None:
    config = EngineConfig(weight_dtype="int8")
    sizes = Chooser(config=config, models=models_on(config), requests=[request(0, 20, 30)], free=2**40).choose().sizes
    sizes = dataclasses.replace(sizes, prompt_logprobs=1, draft_tokens=4)
    model = models_on(config)[{"tensor": 1}]
    found = MemoryModel(model).temporaries(sizes)
    plain = MemoryModel(dataclasses.replace(model, quantized_dtype=None)).temporaries(sizes)
    assert set(found) == {"prefill", "prompt_logprobs", "decode", "verify"}
    (more,) = {found[name] - plain[name] for name in found}
    assert more > 0


def test_what_a_prefill_and_a_decode_step_take_without_a_kernel() -> None:
    """In float32: a row of a prefill has K and V of its context twice, scores, activations; so has a slot of decode."""
    config = EngineConfig(dtype="float32")
    sizes = Chooser(config=config, models=models_on(config), requests=[request(0, 20, 30)], free=2**40).choose().sizes
    sizes = dataclasses.replace(sizes, prefill_rows=3, slots=5, steps=7, pages_per_sequence=2, page_size=16)
    found = MemoryModel(models_on(config)[{"tensor": 1}]).temporaries(sizes)
    kv = 2 * LLAMA.num_kv_heads * LLAMA.head_size * 4
    activations = 4 * (6 * LLAMA.hidden_dim + 3 * LLAMA.intermediate_dim)
    scores = 3 * LLAMA.num_heads * 32 * 4  # of a token, all positions of two pages
    assert found["prefill"] == 3 * (2 * 32 * kv + 16 * scores + 16 * activations)
    logits = 4 * 5 * 4 * models_on(config)[{"tensor": 1}].weights.embed.shape[0]
    assert found["decode"] == logits + 5 * (32 * LLAMA.num_layers * kv + scores + 8 * 7 + activations)


def test_fit_has_the_least_that_is_asked_for() -> None:
    wanted = capacity_of(slots=100, sequences=100, pages=101, pages_per_sequence=1, prefill_rows=8)
    demand = Demand.of([request(0, 1, 1, n_generations=100)], 2)
    least = dataclasses.replace(wanted.with_slots(1), pages=50, prefill_rows=1)

    def bytes_of(sizes: Capacity) -> Footprint:
        return Footprint(weights=0, pool=sizes.pages, reshard=0, temporaries=0)

    assert fit(wanted, demand, bytes_of, 49, least) is None and fit(wanted, demand, bytes_of, 49) is not None
    got = fit(wanted, demand, bytes_of, 51, least)
    assert got is not None and got.pages == 51


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
