"""Capacities and layout from made-up memory and made-up chips."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engine import Engine, EngineConfig
from lockstep.engine import prepare as prepare_module
from lockstep.engine.config import Layout
from lockstep.engine.decode_model import DecodeModel, DecodeModels
from lockstep.engine.decoder.build import Programs
from lockstep.engine.prepare import Prepared, prepare_programs
from lockstep.engine.schedule import Capacity, check_capacity
from lockstep.engine.sizing import choose as choose_module
from lockstep.engine.sizing import cost_model
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.cost_model import estimate
from lockstep.engine.sizing.demand import Demand
from lockstep.engine.sizing.memory_model import Footprint, concurrent_sequences
from lockstep.engine.sizing.result import Sizing
from lockstep.errors import CapacityError, ConfigError
from lockstep.hosts import Ledger
from lockstep.models import Experts, Qwen3MoeConfig, read_decoder
from lockstep.models.trainable import skeleton
from lockstep.placement import make_mesh
from lockstep.placement.device import Chip, Link
from lockstep.types import Drafts, Request
from tests.oracle import assert_same_tokens
from tests.unit.engine.models import LLAMA, SIZES, VOCAB, mesh_of, model_on, request
from tests.unit.engine.sizing.made_up import ROOMY, choose, least_that_works, models_on


@functools.cache
def scarce(count: int) -> int:
    """Free bytes that hardly do for ``count`` requests; what a chip is good at does not matter for it."""
    return least_that_works(equal_requests(count), within=1000) + 5000


def equal_requests(count: int) -> list[Request]:
    return [request(i, 20, 30) for i in range(count)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=6),
    share=st.floats(0.0, 1.5),
    utilization=st.floats(0.1, 1.0),
    caps=st.fixed_dictionaries(
        {},
        optional={
            "max_seqs": st.integers(1, 20),
            "max_pages": st.integers(20, 60),
            "page_size": st.sampled_from([4, 8, 16]),
            "max_prefill_size": st.integers(16, 100),
            "max_steps_per_launch": st.integers(1, 30),
            "layout": st.sampled_from(["auto", "training", {"tensor": 1}, {"tensor": 2}]),
        },
    ),
)
def check_a_choice(lengths: list[tuple[int, int, int]], share: float, utilization: float, caps: dict[str, Any]) -> None:
    requests = [request(i, prompt, new, n_generations=n) for i, (prompt, new, n) in enumerate(lengths)]
    roomy = choose(requests, ROOMY, **caps)
    assert roomy.sizes == roomy.wanted
    free = int(roomy.predicted.total * share / utilization)
    try:
        got = choose(requests, free, hbm_utilization=utilization, **caps)
    except CapacityError as error:
        assert "The longest sequence that fits" in str(error) or "Not one token fits" in str(error)
        return
    assert got.predicted.total <= got.budget <= free
    assert got.headroom >= 0
    check_capacity(got.sizes, requests)
    for field in dataclasses.fields(Capacity):
        if field.name != "replicas" and got.layout == roomy.layout:
            assert getattr(got.sizes, field.name) <= getattr(roomy.sizes, field.name), field.name
    assert got.sizes.sequences <= caps.get("max_seqs", 10**9)
    assert got.sizes.pages <= caps.get("max_pages", 10**9)
    assert got.sizes.steps <= caps.get("max_steps_per_launch", 10**9)
    assert got.sizes.prefill_rows * got.sizes.page_size <= caps.get("max_prefill_size", 10**9)
    assert got == choose(requests, free, hbm_utilization=utilization, **caps), "the same numbers, the same decision"


@pytest.mark.parametrize("examples", [8, pytest.param(60, marks=pytest.mark.nightly)])
def test_what_is_chosen_fits_the_budget_and_the_caps(examples: int) -> None:
    settings(max_examples=examples)(check_a_choice)()


def test_less_memory_never_gives_more() -> None:
    requests = [request(i, 20, 12, n_generations=2) for i in range(20)]
    options: dict[str, Any] = {"layout": {"tensor": 1}, "max_prefill_size": 16}
    full = choose(requests, ROOMY, **options)
    at_a_time = []
    for share in (1.2, 1.0, 0.8, 0.6, 0.5):
        got = choose(requests, int(full.predicted.total * share / 0.9) + 1, **options)
        at_a_time.append(min(got.sizes.sequences, got.sizes.replicas * (got.sizes.pages - 1) // 2))
    assert at_a_time == sorted(at_a_time, reverse=True) and at_a_time[0] > at_a_time[-1] >= 1


def test_too_little_memory_says_what_would_work() -> None:
    requests = [request(0, 3, 2), request(7, 40, 16)]
    needed = least_that_works(requests, layout={"tensor": 1})
    with pytest.raises(CapacityError) as caught:
        choose(requests, needed - 1, layout={"tensor": 1})
    text = str(caught.value)
    for part in ("prompt 7 has 40 tokens and max_new_tokens is 16", "per device", "decode weights", "KV cache"):
        assert part in text, text
    for part in (
        "hbm_utilization 0.9 of the",
        "set layout to auto or {tensor: 2}",
        "raise hbm_utilization to at least",
    ):
        assert part in text, text
    longest = int(text.split("The longest sequence that fits is ")[1].split(" tokens")[0])
    assert 0 < longest < 56
    assert f"horten the prompt to at most {longest - 16} tokens" in text
    # The advice works: a prompt of that length is accepted, and so is that utilization.
    choose([request(7, longest - 16, 16)], needed - 1, layout={"tensor": 1})
    share = float(text.split("raise hbm_utilization to at least ")[1].split(",")[0])
    choose(requests, needed - 1, layout={"tensor": 1}, hbm_utilization=share)
    with pytest.raises(CapacityError, match="Not one token fits"):
        choose(requests, 1000)


@pytest.mark.parametrize(
    ("bandwidth", "latency"),
    [
        (1e6, 1e-7),
        (1e13, 1e-4),
        *(
            pytest.param(*link, marks=pytest.mark.slow)
            for link in ((1e6, 1e-4), (1e9, 1e-7), (1e9, 1e-4), (1e13, 1e-7))
        ),
    ],
)
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("roomy", [True, False])
def test_auto_is_the_best_of_all_layouts(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float, latency: float, count: int, roomy: bool
) -> None:
    link = Link(bandwidth=bandwidth * 4, latency_s=latency)
    chip = Chip(name="made up", memory=ROOMY, bandwidth=bandwidth, flops=1e15, link=link, network=link)
    monkeypatch.setattr(choose_module, "chip_of", lambda _: chip)
    requests, free = equal_requests(count), ROOMY if roomy else scarce(count)
    models = models_on(EngineConfig())
    every: list[tuple[float, Layout]] = []
    # Two kv heads: four devices split their positions. All devices are of one process.
    split, idle = {"tensor": 4, "context": 2}, {"tensor": 1, "replicas": 1}
    layouts: tuple[Layout, ...] = ({"tensor": 1}, {"tensor": 2}, split, idle, "training")
    for layout in layouts:
        try:
            alone = choose(requests, free, layout=layout)
        except CapacityError:
            continue
        found = estimate(models[layout], alone.sizes, Demand.of(requests, alone.sizes.page_size), chip)
        every.append((found.total_s, layout))
    got = choose(requests, free)
    assert got.layout == min(every, key=lambda pair: pair[0])[1]
    assert [choice.layout for choice in got.considered] == list(layouts)


def test_auto_takes_smaller_groups_where_collectives_are_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = Link(bandwidth=1e15, latency_s=0.0, hop_s=1e-9)
    chip = Chip(name="CPU", memory=ROOMY, bandwidth=1e6, flops=1e15, link=link, network=link)
    monkeypatch.setattr(choose_module, "chip_of", lambda _: chip)
    monkeypatch.setattr(cost_model, "count_memories", len)  # each device has a memory of its own
    assert choose(equal_requests(4), ROOMY).layout == {"tensor": 4, "context": 2}
    slow = tmp_path / "measured.json"
    head = {"lockstep_calibration": 1, "chip": "CPU", "measured": "never"}
    slow.write_text(json.dumps(head | {"link": {"hop_s": 10.0}}))
    got = choose(equal_requests(4), ROOMY, calibration=str(slow))
    assert got.layout == {"tensor": 1}
    assert f"predicted with the numbers of CPU and {slow}, at best" in got.describe()


def test_page_tables_reach_as_far_as_what_verifies_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span of 30 positions looks up to two pages of 16 beyond a sequence's last one."""
    widths: list[int] = []
    monkeypatch.setattr(choose_module, "max_page_table_rows", lambda _, heads, pages: widths.append(pages) or 2)
    drafted = [dataclasses.replace(each, drafts=Drafts()) for each in equal_requests(6)]
    plain, verifying = (choose(requests, ROOMY, page_size=16) for requests in (equal_requests(6), drafted))
    assert plain.sizes.slots == verifying.sizes.slots == 2
    pages = plain.sizes.pages_per_sequence
    assert set(widths) == {pages, pages + 2} and widths[0] == pages and widths[-1] == pages + 2


def test_auto_on_this_machine() -> None:
    # What the demo does: a small model, many short answers, weights moved once.
    # The devices of a process share its memory: a second replica would read the weights through it a second time.
    got = choose([request(i, 8, 12) for i in range(32)], ROOMY)
    assert got.layout == {"tensor": 1, "replicas": 1} and got.sizes.slots == 32
    assert list(got.sizes.active_replicas) == [0] and got.sizes.replicas == 4
    assert "layout {tensor: 1, replicas: 1}, 1 replicas of 4, 32 sequences in each" in got.describe()


@pytest.mark.slow
def test_short_memory_makes_requests_wait_and_changes_no_token() -> None:
    model = model_on("1,2,2")
    requests = [request(i, 9 + i, 8, temperature=0.8 * (i % 2), seed=i) for i in range(12)]
    options: dict[str, Any] = {
        "page_size": 8,
        "layout": {"tensor": 2},
        "max_steps_per_launch": 4,
        "max_prefill_size": 8,
    }
    roomy = Engine(EngineConfig(**options), mesh_of("1,2,2"))
    expected = roomy.generate(model, requests)
    assert roomy.sizing is not None and roomy.sizing.compiled is not None
    free = int(0.75 * roomy.sizing.compiled.total / 0.9)
    engine = Engine(EngineConfig(memory_bytes_per_device=free, **options), mesh_of("1,2,2"))
    got = engine.generate(model, requests)
    sizing = engine.sizing
    assert sizing is not None and sizing.compiled is not None
    print(sizing.describe())
    assert sizing.sizes.slots < roomy.sizing.sizes.slots and sizing.reasons["max_seqs"][1] == "memory"
    assert sizing.compiled.total <= sizing.budget
    assert assert_same_tokens(expected, got) == 0
    # The same requests, or fewer, compile nothing while the memory is about the same.
    before = engine.programs["decode"]
    for share in (1.0, 1.03, 0.97):
        engine.prepare(model, requests, free=int(share * free))
        engine.prepare(model, requests[:3], free=int(share * free))
    assert engine.programs["decode"] is before
    # More requests may grow it once.
    engine.prepare(model, [*requests, *(request(i, 9, 8) for i in range(20, 30))], free=ROOMY)
    assert engine.sizes is not None and engine.sizes.slots == 11


@pytest.fixture(scope="module")
def tpu_models() -> Callable[..., DecodeModels]:
    """A model for long sequences on one device of a v5p, which runs nothing."""
    pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")
    from lockstep.xla import topology

    mesh = make_mesh("1,1,1", list(topology("v5p-8").devices[:1]))
    model = dataclasses.replace(LLAMA, max_seq_len=2 * LONG)
    on_tpu = NamedSharding(mesh, PartitionSpec())
    config, weights = read_decoder(model_on("1,1,1", model))
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_tpu), weights)
    return lambda engine: DecodeModels(engine, config, structs, mesh)


def test_experts_are_split_whole_or_by_width_as_a_batch_reads_them_faster() -> None:
    """Experts as Qwen3-30B-A3B's on four chips, where a quarter of 768 columns takes 256."""
    pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")
    from lockstep.xla import topology

    mesh = make_mesh("1,1,4", list(topology("v6e-4").devices))
    experts = Experts(num_experts=128, num_experts_per_tok=8, intermediate_dim=768)
    model = Qwen3MoeConfig(**SIZES | {"hidden_dim": 1024, "num_kv_heads": 4, "max_seq_len": 1024}, experts=experts)
    config, weights = read_decoder(skeleton(VOCAB, model))
    on_tpu = NamedSharding(mesh, PartitionSpec())
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_tpu), weights)
    engine = EngineConfig(layout={"tensor": 4}, dtype="bfloat16")
    models = DecodeModels(engine, config, structs, mesh)
    choosers = {
        count: Chooser(config=engine, models=models, requests=[request(i, 20, 1000) for i in range(count)], free=ROOMY)
        for count in (1, 256)
    }
    found = {count: chooser.choose() for count, chooser in choosers.items()}
    assert [each.layout["expert"] for each in found.values()] == [1, 4]
    assert all(len(each.considered) == 2 for each in found.values())
    (up,) = [weight for weight in models[{"tensor": 4, "expert": 1}].leaves if weight.name == "expert_up"]
    assert up.decode_bytes == 2 * 128 * 1024 * 256 * 2 and up.decode_size == 2 * 128 * 1024 * 192
    assert choosers[1].choose(found[256]).layout == found[256].layout, "what is compiled stays"


LONG = 131072


def long_requests(count: int, length: int = LONG) -> list[Request]:
    return [request(i, 64, length - 64) for i in range(count)]


def test_pages_grow_until_page_tables_fit_in_scalar_memory(tpu_models: Callable[..., DecodeModels]) -> None:
    config = EngineConfig()
    fewer = Chooser(config=config, models=tpu_models(config), requests=long_requests(96), free=ROOMY)
    more = dataclasses.replace(fewer, requests=long_requests(97))
    few = fewer.choose()
    assert (few.sizes.slots, few.sizes.page_size) == (96, 64) and "page_size" not in few.reasons
    many = more.choose(few)
    assert (many.sizes.slots, many.sizes.page_size, many.sizes.pages_per_sequence) == (97, 128, 1024)
    assert many.reasons["page_size"][0] == 128 and many.sizes.pages == 97 * 1024 + 1
    assert "page_size 128: page tables of pages of 64 do not fit in scalar memory" in many.describe()
    assert fewer.choose(many).sizes == many.sizes, "what was compiled stays in use"


def test_where_pages_may_not_grow_fewer_sequences_decode_at_a_time(tpu_models: Callable[..., DecodeModels]) -> None:
    config = EngineConfig(page_size=64)
    got = Chooser(config=config, models=tpu_models(config), requests=long_requests(128), free=ROOMY).choose()
    assert (got.sizes.slots, got.sizes.page_size) == (96, 64)
    assert got.reasons["max_seqs"] == (96, "scalar memory") and "page_size" not in got.reasons
    config = EngineConfig(page_size=1)
    with pytest.raises(ConfigError, match=r"page_size is 1 .* may have 262144: .* Set page_size to null"):
        Chooser(config=config, models=tpu_models(config), requests=long_requests(1, 2 * LONG), free=ROOMY).choose()


def test_capacities_follow_the_memory_without_compiling_in_between() -> None:
    requests, config = equal_requests(12), EngineConfig(layout={"tensor": 2}, max_prefill_size=16)
    models = models_on(config)
    roomy = choose(requests, ROOMY, layout={"tensor": 2}, max_prefill_size=16)
    tight = int(0.6 * roomy.predicted.total / 0.9)

    def again(sizing: Sizing, free: int, some: list[Request] = requests) -> Sizing:
        return Chooser(config=config, models=models, requests=some, free=free).choose(sizing)

    small = Chooser(config=config, models=models, requests=requests, free=tight).choose()
    assert 1 < small.sizes.slots < roomy.sizes.slots / 1.5
    # A little more is not worth compiling; twice as much is, once.
    assert again(small, int(1.05 * tight)).sizes == small.sizes
    grown = again(small, 2 * tight)
    assert grown.sizes == roomy.sizes and again(grown, 4 * tight).sizes == grown.sizes
    # Requests that all fit at a time gain nothing from more.
    assert again(small, 2 * tight, requests[: small.sizes.slots]).sizes == small.sizes
    # What is in use stays where it fits, and shrinks where it does not.
    assert again(grown, grown.predicted.total).sizes == grown.sizes
    assert again(grown, tight).sizes == small.sizes


def test_a_larger_capacity_is_compiled_from_a_quarter_more_on() -> None:
    requests, config = equal_requests(30), EngineConfig(layout={"tensor": 2}, max_prefill_size=16)
    models = models_on(config)
    roomy = choose(requests, ROOMY, layout={"tensor": 2}, max_prefill_size=16)

    def at(share: float, before: Sizing | None = None) -> Sizing:
        free = int(share * roomy.predicted.total / 0.9)
        return Chooser(config=config, models=models, requests=requests, free=free).choose(before)

    def at_a_time(sizing: Sizing) -> int:
        return concurrent_sequences(sizing.sizes, Demand.of(requests, sizing.sizes.page_size))

    small = at(0.6)
    seen = set()
    for percent in range(60, 101, 2):
        possible = at(percent / 100)
        worth = at_a_time(possible) / at_a_time(small)
        seen.add(round(worth, 2))
        assert at(percent / 100, small).sizes == (possible if worth >= 1.25 else small).sizes
    assert any(1 < worth < 1.25 for worth in seen) and any(1.25 <= worth < 1.5 for worth in seen)


def test_where_nothing_fits_in_the_layout_in_use_another_is_chosen() -> None:
    requests, config = equal_requests(1), EngineConfig()
    before = choose(requests, ROOMY, layout={"tensor": 1})
    chooser = Chooser(config=config, models=models_on(config), requests=requests, free=least_that_works(requests))
    found = chooser.choose(before)
    assert found.layout != before.layout and found == chooser.choose()


def test_an_engine_that_could_not_grow_does_not_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, config = equal_requests(12), EngineConfig(layout={"tensor": 2}, max_prefill_size=16)
    roomy = choose(requests, ROOMY, layout={"tensor": 2}, max_prefill_size=16)
    tight, models = int(0.6 * roomy.predicted.total / 0.9), models_on(config)
    built: list[Capacity] = []

    def build(model: DecodeModel, sizes: Capacity, **_: Any) -> Programs:
        built.append(sizes)
        return object.__new__(Programs)

    monkeypatch.setattr(prepare_module, "build_programs", build)
    needed = {"bytes": 1}  # by the compiler
    monkeypatch.setattr(
        prepare_module, "measured", lambda _: Footprint(weights=0, pool=0, reshard=0, temporaries=needed["bytes"])
    )

    def prepare(free: int, before: Prepared | None) -> Prepared:
        excess = before.excess if before else {}
        chooser = Chooser(config=config, models=models, requests=requests, free=free, excess=excess)
        return prepare_programs(chooser, vocab_size=None, ledger=Ledger(), before=before)

    first = prepare(tight, None)
    needed["bytes"] = 4 * tight
    second = prepare(2 * tight, first)
    assert built == [first.sizing.sizes, roomy.sizes] and second.sizing.sizes == first.sizing.sizes
    assert prepare(2 * tight, second) is second and len(built) == 2
    needed["bytes"] = 1
    third = prepare(16 * tight, second)
    assert third.sizing.sizes == roomy.sizes and prepare(16 * tight, third) is third
