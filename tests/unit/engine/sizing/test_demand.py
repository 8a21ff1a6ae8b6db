"""What requests ask for, within the caps, and requests whose numbers the model cannot use."""

import dataclasses
from typing import Any

import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.decode_model import DecodeModels
from lockstep.engine.schedule import Capacity, check_capacity
from lockstep.engine.sizing.demand import Demand, desired_capacity, max_prompts, measure_demand, slots_per_replica
from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, read_decoder
from lockstep.types import Drafts, Request
from tests.unit.engine.models import mesh_of, model_on, request

LONG = LlamaConfig(
    max_seq_len=8192, hidden_dim=16, intermediate_dim=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8
)


def sizes(requests: list[Request], mesh: str = "1,4,1", before: Capacity | None = None, **options: Any):
    config = EngineConfig(**options)
    models = DecodeModels(config, *read_decoder(model_on(mesh, LONG)), mesh_of(mesh))
    return desired_capacity(config, models[{"tensor": 1}], measure_demand(config, models, requests), before)


def test_what_follows_from_the_requests() -> None:
    got = sizes([request(0, 33, 10, n_generations=5), request(1, 5, 40)])
    assert got == Capacity(
        replicas=4,
        sequences=6,
        slots=2,
        page_size=16,
        pages=2 * 3 + 1,  # 45 tokens are 3 pages
        pages_per_sequence=3,
        prefill_rows=4,  # two slots of 32 prompt tokens each
        steps=40,
        stop_ids=4,
    )


def test_a_demand_is_of_the_longest_request_and_of_the_mean_sequence() -> None:
    requests = [request(0, 33, 10, n_generations=5), request(1, 5, 40, stop_token_ids=(1, 2)), request(2, 17, 16)]
    got = Demand.of(requests, 16)
    # 42, 44 and 32 tokens have K/V: the last one's is never read.
    assert (got.longest, got.mean, got.sequences) == (3, (5 * 3 + 3 + 2) / 7, 7)
    assert got.context == (5 * 38 + 25 + 25) / 7
    assert (got.new_tokens, got.tokens, got.prefill, got.generations) == (40, 45, 32, (5, 1, 1))


@pytest.mark.parametrize(("slots", "generations", "prompts"), [(8, 1, 32), (8, 3, 11), (1, 64, 1)])
def test_prompts_of_a_batch_fill_every_slot_twice(slots: int, generations: int, prompts: int) -> None:
    """Also where all of them have as few generations as the one that has fewest."""
    counts = (generations, generations + 3)
    demand = Demand.of([request(n, 5, 4, n_generations=count) for n, count in enumerate(counts)], 16)
    capacity = dataclasses.replace(sizes([request(0, 5, 4)]), sequences=2 * slots)
    assert max_prompts(EngineConfig(), capacity, demand) == prompts
    assert max_prompts(EngineConfig(max_prompts_per_batch=7), capacity, demand) == 7


def test_bounds_where_nothing_is_said() -> None:
    got = sizes([request(i, 64, 100) for i in range(500)])
    assert (got.sequences, got.slots, got.prefill_rows, got.steps) == (256, 64, 32, 64)


def test_drafts_add_programs_that_verify_them() -> None:
    """Up to four launches' worth of tokens, and no more than an answer has."""

    def widths(new: int, **options: Any) -> tuple[int, tuple[int, ...]]:
        drafted = dataclasses.replace(request(0, 9, new), drafts=Drafts())
        got = sizes([drafted, request(1, 9, 1)], **options)
        return got.draft_tokens, got.verify_widths

    assert sizes([request(0, 9, 100)]).verify_widths == ()
    assert widths(500) == (256, (8, 64)) and widths(100) == (100, (8, 64))
    assert widths(40) == (40, (8, 40)) and widths(5) == (5, (5,)) and widths(1)[1] == ()
    assert widths(100, max_steps_per_launch=5) == (20, (8, 20))


def test_explicit_values_are_caps() -> None:
    requests = [request(i, 33, 40) for i in range(50)]
    caps = {"max_seqs": 10, "page_size": 8, "max_pages": 12, "max_prefill_size": 20, "max_steps_per_launch": 7}
    got = sizes(requests, **caps)
    assert (got.sequences, got.slots, got.page_size, got.pages, got.prefill_rows, got.steps) == (10, 3, 8, 12, 2, 7)
    assert sizes(requests, max_seq_len=500).pages_per_sequence == 32
    # A cap is not a wish: what the requests do not need is not taken.
    few = sizes([request(0, 1, 2)], max_seqs=10, max_pages=1000, max_prefill_size=512, max_steps_per_launch=64)
    assert (few.sequences, few.slots, few.pages, few.prefill_rows, few.steps) == (1, 1, 2, 1, 2)


def test_fewer_sequences_than_replicas() -> None:
    got = sizes([request(i, 5, 5) for i in range(9)], max_seqs=2)
    assert (got.replicas, got.sequences, got.slots) == (4, 2, 1)


def test_sizes_grow_and_never_shrink() -> None:
    first = sizes([request(0, 40, 8)])
    second = sizes([request(i, 5, 20) for i in range(8)], before=first)
    for field in dataclasses.fields(Capacity):
        assert getattr(second, field.name) >= getattr(first, field.name), field.name
    assert second.slots == 2 and second.pages == 2 * second.pages_per_sequence + 1 and second.steps == 20
    assert sizes([request(0, 40, 8)], before=second) == second
    check_capacity(second, [request(0, 40, 8), *(request(i, 5, 20) for i in range(1, 8))])


@pytest.mark.parametrize(
    ("platform", "kind", "itemsize", "slots"),
    [("cpu", "cpu", 4, 64), ("tpu", "TPU v5p", 2, 128), ("tpu", "TPU v6 lite", 2, 512), ("gpu", "NVIDIA H200", 2, 192)],
)
def test_sequences_that_a_device_is_worth(platform: str, kind: str, itemsize: int, slots: int) -> None:
    assert slots_per_replica(kind, platform, itemsize) == slots


@pytest.mark.slow
def test_auto_fills_every_slot_twice() -> None:
    engine = Engine(EngineConfig(max_seqs=6), mesh_of("1,1,1"))
    engine.prepare(model_on("1,1,1"), [request(i, 3, 2, n_generations=2) for i in range(20)])
    sizing = engine.sizing
    assert sizing is not None and sizing.reasons["max_prompts_per_batch"] == (6, "fills max_seqs twice")
    with pytest.raises(ConfigError, match="max_prompts_per_batch is 0; it must be at least 1"):
        EngineConfig(max_prompts_per_batch=0)


REFUSED = [
    ({"logit_bias": ((40, 1.0),)}, "logit_bias of prompt 0 has 40; the ids that can be sampled are 0 to 29"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias of prompt 0 has -1"),
    ({"allowed_token_ids": (3, 30)}, "allowed_token_ids of prompt 0 has 30; the ids that can be sampled are 0 to 29"),
    ({"top_logprobs": 31}, "top_logprobs of prompt 0 is 31; there are 30 tokens. Set it to at most 30"),
    (
        {"stop_token_ids": tuple(range(30)), "min_tokens": 1},
        "all 30 tokens are stop tokens of prompt 0 and min_tokens is 1, so that none could be sampled. Remove a stop",
    ),
]


@pytest.mark.parametrize(("params", "message"), REFUSED)
def test_what_the_vocabulary_does_not_have(params: dict[str, Any], message: str) -> None:
    engine = Engine(EngineConfig(), mesh_of("1,1,1"), vocab_size=30)
    with pytest.raises(ConfigError, match=message):
        engine.check(model_on("1,1,1"), [request(0, 9, 4, **params)])
