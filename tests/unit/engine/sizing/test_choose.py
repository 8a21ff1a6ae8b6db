"""Capacities and layout from made-up memory and made-up chips."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.device import Chip, Link, chip_named
from lockstep.engine import Engine, EngineConfig
from lockstep.engine.config import Layout
from lockstep.engine.decode_model import DecodeModels
from lockstep.engine.idle_replicas import layout_with_idle_replicas
from lockstep.engine.sizing import choose as choose_module
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.cost_model import estimate
from lockstep.engine.sizing.demand import Demand, desired_capacity
from lockstep.engine.sizing.fit import fit
from lockstep.engine.sizing.memory_model import Footprint
from lockstep.engine.sizing.result import Sizing
from lockstep.errors import CapacityError, ConfigError
from lockstep.models import read_decoder
from lockstep.plan.topology import topology
from lockstep.schedule import Capacity, check_capacity
from lockstep.types import Request
from tests.oracle import assert_same_tokens
from tests.unit.engine.models import mesh_of, model_on, request

ROOMY = 2**40


def choose(requests: list[Request], free: int, mesh: str = "1,2,2", **options: Any) -> Sizing:
    config = EngineConfig(**options)
    return Chooser(config=config, models=models_on(config, mesh), free=free).choose(requests)


def models_on(config: EngineConfig, mesh: str = "1,2,2") -> DecodeModels:
    return DecodeModels(config, *read_decoder(model_on(mesh)), mesh_of(mesh))


def least_that_works(requests: list[Request], **options: Any) -> int:
    """Free bytes from which on the requests are accepted."""
    low, high = 0, ROOMY
    while high - low > 1:
        middle = (low + high) // 2
        try:
            choose(requests, middle, **options)
        except CapacityError:
            low = middle
        else:
            high = middle
    return high


@settings(max_examples=60, deadline=None)
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
def test_what_is_chosen_fits_the_budget_and_the_caps(
    lengths: list[tuple[int, int, int]], share: float, utilization: float, caps: dict[str, Any]
) -> None:
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


def test_less_memory_never_gives_more() -> None:
    requests = [request(i, 20, 12, n_generations=2) for i in range(20)]
    options: dict[str, Any] = {"layout": {"tensor": 1}, "max_prefill_size": 16}
    full = choose(requests, ROOMY, **options)
    at_a_time = []
    for share in (1.2, 1.0, 0.8, 0.6, 0.5):
        got = choose(requests, int(full.predicted.total * share / 0.9) + 1, **options)
        at_a_time.append(min(got.sizes.sequences, got.sizes.replicas * (got.sizes.pages - 1) // 2))
    assert at_a_time == sorted(at_a_time, reverse=True) and at_a_time[0] > at_a_time[-1] >= 1


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


def test_reasons_and_words() -> None:
    requests = [request(i, 20, 12) for i in range(16)]
    got = choose(requests, ROOMY)
    assert {why for _, why in got.reasons.values()} == {"all requests fit"}
    capped = choose(requests, ROOMY, max_seqs=3, max_steps_per_launch=5)
    assert capped.reasons["max_seqs"] == (3, "cap given") and capped.reasons["max_steps_per_launch"] == (5, "cap given")
    assert capped.reasons["max_pages"][1] == "all requests fit"
    tight = choose(requests, least_that_works(requests) + 20000)
    assert tight.reasons["max_pages"][1] == "memory"
    text = tight.describe()
    for part in ("decode weights", "KV cache", "temporaries", "stay free", "max_pages", ": memory", "* ", "training:"):
        assert part in text, part
    assert choose([request(i, 2, 2) for i in range(300)], ROOMY, layout={"tensor": 1}).reasons["max_seqs"] == (
        256,
        "default",
    )


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


@pytest.mark.parametrize("bandwidth", [1e6, 1e9, 1e13])
@pytest.mark.parametrize("latency", [1e-7, 1e-4])
@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("scarce", [False, True])
def test_auto_is_the_best_of_all_layouts(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float, latency: float, count: int, scarce: bool
) -> None:
    link = Link(bandwidth=bandwidth * 4, latency_s=latency)
    chip = Chip(name="made up", memory=ROOMY, bandwidth=bandwidth, flops=1e15, link=link, network=link)
    monkeypatch.setattr(choose_module, "chip_of", lambda _: chip)
    requests = [request(i, 20, 30) for i in range(count)]
    free = least_that_works(requests) + 5000 if scarce else ROOMY
    models = models_on(EngineConfig())
    every: list[tuple[float, Layout]] = []
    # Two kv heads: four cannot share them. All devices are of one process.
    layouts: tuple[Layout, ...] = ({"tensor": 1}, {"tensor": 2}, {"tensor": 1, "replicas": 1}, "training")
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


def test_auto_on_this_machine() -> None:
    # What the demo does: a small model, many short answers, weights moved once.
    # The devices of a process share its memory: a second replica would read the weights through it a second time.
    got = choose([request(i, 8, 12) for i in range(32)], ROOMY)
    assert got.layout == {"tensor": 1, "replicas": 1} and got.sizes.slots == 32
    assert list(got.sizes.active_replicas) == [0] and got.sizes.replicas == 4
    assert "layout {tensor: 1, replicas: 1}, 1 replicas of 4, 32 sequences in each" in got.describe()


def test_devices_with_memory_of_their_own_all_decode() -> None:
    pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")
    assert layout_with_idle_replicas(list(mesh_of("1,2,2").devices.flat)) == {"tensor": 1, "replicas": 1}
    assert layout_with_idle_replicas(list(topology("v5p-8").devices)) is None
    assert layout_with_idle_replicas(list(mesh_of("1,1,1").devices.flat)) is None, "one device alone is not idle"


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("TPU v4", "tpu", "TPU v4"),
        ("TPU v5", "tpu", "TPU v5p"),
        ("TPU v5 lite", "tpu", "TPU v5e"),
        ("TPU v6 lite", "tpu", "TPU v6e"),
        ("TPU v9", "tpu", "TPU v5p"),
        ("NVIDIA H100 80GB HBM3", "gpu", "H100"),
        ("NVIDIA H200", "gpu", "H200"),
        ("cpu", "cpu", "CPU"),
    ],
)
def test_chips(kind: str, platform: str, name: str) -> None:
    assert chip_named(kind, platform).name == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hbm_utilization": 0.0},
            r"hbm_utilization is 0\.0; it must be more than 0 and at most 1.*The default is 0\.9",
        ),
        ({"hbm_utilization": 1.5}, r"hbm_utilization is 1\.5"),
        ({"hbm_utilization": float("nan")}, "hbm_utilization is nan"),
        ({"memory_bytes_per_device": 0}, "memory_bytes_per_device is 0; it must be at least 1"),
    ],
)
def test_values_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


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
    # The same requests again compile nothing, however much memory there is by then.
    before = engine.programs["decode"]
    engine.prepare(model, requests, free=ROOMY)
    engine.prepare(model, requests[:3], free=free // 100)
    assert engine.programs["decode"] is before
    # More may grow it once.
    engine.prepare(model, [*requests, *(request(i, 9, 8) for i in range(20, 30))], free=ROOMY)
    assert engine.sizes is not None and engine.sizes.slots == 11
