"""What the engine does besides the right tokens: launches, compilations, memory, order, streams, errors."""

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig, Gate
from lockstep.engine.schedule import Scheduler
from lockstep.errors import CapacityError, ConfigError, LockstepError, PromptError
from lockstep.hosts import current
from lockstep.models.experts import Routing, route
from lockstep.types import Drafts, Request
from tests.memory import live_arrays
from tests.oracle import assert_same_tokens, oracle_completions
from tests.unit.engine.models import FAMILIES, LLAMA, VOCAB, Between, mesh_of, mixed_requests, model_on, request
from tests.unit.engine.schedule.test_intake import Talk


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(layout={"tensor": 2}, page_size=8, max_seqs=4, max_steps_per_launch=5), mesh_of("1,2,2"))


@pytest.fixture(scope="module")
def model() -> Any:
    return model_on("1,2,2")


LISTENERS: list[list[str]] = []


def _listen(event: str, duration: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile"):
        for events in LISTENERS:
            events.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of what is traced, lowered or compiled inside."""
    events: list[str] = []
    LISTENERS.append(events)
    yield events
    LISTENERS.remove(events)


def test_preparing_launches_nothing_and_a_second_run_compiles_nothing(engine: Engine, model: Any) -> None:
    requests = mixed_requests()
    with compilations() as events, jax.no_execution(True):
        digests = engine.prepare(model, requests)
    assert events, "the listener hears nothing"
    names = ["reshard", "new_cache", "prefill", "copy_pages", "decode"]
    *programs, schedule = dict.fromkeys(name.partition(":")[0] for name in digests)
    assert programs == list(engine.programs) == names and schedule.startswith("schedule")
    compiled = engine.compilations
    assert [each.name for each in compiled] == names and all(each.seconds > 0 for each in compiled)
    sizes = engine.sizes
    assert sizes is not None
    pool = f"float32[{2 * 2 * sizes.pages},8,4,8]"  # replicas, layers; two kv heads of 8 with K and V
    assert [pool in each.shapes for each in compiled] == [False, False, True, True, True]
    aliased = [engine.programs[name].memory().alias_size_in_bytes for name in names]
    assert engine.sizing is not None and engine.sizing.compiled is not None
    assert aliased == [0, 0, *[engine.sizing.compiled.pool] * 3], "the cache is written in place"
    first = engine.generate(model, requests)
    launches = list(engine.ledger.launches)
    with compilations() as events:
        assert engine.prepare(model, requests) == digests
        second = engine.generate(model, requests)
    assert not events, "the second round compiles"
    assert engine.compilations == compiled
    assert first == second
    assert engine.ledger.launches == launches * 2
    assert launches[:3] == ["reshard", "new_cache", "prefill"] and "decode" in launches
    assert {name: program.traces for name, program in engine.programs.items()} == dict.fromkeys(names, 1)


def test_device_memory_is_what_it_was(engine: Engine, model: Any) -> None:
    engine.generate(model, mixed_requests())
    before = live_arrays()
    engine.generate(model, mixed_requests())
    after = live_arrays()
    assert len(after) == len(before)
    assert sum(a.nbytes for a in after) == sum(a.nbytes for a in before)


def test_free_memory_is_measured_when_the_step_has_ended(
    engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: seen.append(len(jax.tree.leaves(tree))))
    monkeypatch.setattr("lockstep.engine.engine.free_bytes", lambda mesh, weights: seen.append("measured") or 7)
    assert engine.free_bytes(model) == 7
    assert seen == [len(jax.tree.leaves(model)), "measured"]


def test_the_model_is_left_as_it_was(engine: Engine, model: Any) -> None:
    before = jax.tree.map(np.asarray, model)
    engine.generate(model, mixed_requests())
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, model))


def test_around_each_launch(engine: Engine, model: Any) -> None:
    engine.prepare(model, mixed_requests())
    seen: list[str] = []

    class Watched(Gate):
        @contextlib.contextmanager
        def launch(self, program: str) -> Iterator[None]:
            start = len(engine.ledger.launches)
            yield
            assert program in engine.ledger.launches[start:]
            seen.append(program)

    list(engine.stream(model, mixed_requests(), gate=Watched()))
    assert seen[0] == "reshard" and set(seen) == {"reshard", "prefill", "copy_pages", "decode"}


def test_a_changed_model_gives_its_own_tokens_without_a_compilation(engine: Engine, model: Any) -> None:
    requests = [request(0, 9, 8), request(1, 20, 8)]
    before = engine.generate(model, requests)
    changed = jax.tree.map(lambda leaf: leaf[..., ::-1] * 1.5, model)
    changed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), changed, model)
    digests = engine.prepare(model, requests)
    assert engine.prepare(changed, requests) == digests
    after = engine.generate(changed, requests)
    assert [c.tokens for c in after] != [c.tokens for c in before]
    assert assert_same_tokens(oracle_completions(changed, requests), after) == 0


def test_no_requests_no_answers(engine: Engine, model: Any) -> None:
    launches = len(engine.ledger.launches)
    assert engine.generate(model, []) == []
    assert len(engine.ledger.launches) == launches


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 2}, pytest.param({"tensor": 4}, marks=pytest.mark.nightly), "auto"])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma", marks=pytest.mark.nightly)])
def test_layers_in_stages_are_moved_to_every_replica(family: str, layout: Any) -> None:
    model = model_on("pp=2,fsdp=2", FAMILIES[family])
    assert model.layers.stacked.attention.q.array.sharding.spec[0] == "pp"
    moved = Engine(EngineConfig(layout=layout, page_size=8, max_seqs=4), mesh_of("pp=2,fsdp=2"))
    assert assert_same_tokens(oracle_completions(model, mixed_requests()), moved.generate(model, mixed_requests())) == 0
    assert moved.programs["reshard"].traces == 1


def test_layers_in_stages_cannot_be_read_in_place() -> None:
    with pytest.raises(ConfigError, match=r"layout training reads each layer where it is, .*'pp': 2.*\{tensor: n\}"):
        Engine(EngineConfig(layout="training"), mesh_of("pp=2,fsdp=2")).check(model_on("pp=2,fsdp=2"), mixed_requests())


@pytest.mark.slow
def test_any_mesh_context_will_do(engine: Engine, model: Any) -> None:
    requests = [request(0, 9, 4)]
    expected = oracle_completions(model, requests)
    other = Engine(engine.config, mesh_of("1,2,2"))
    with jax.set_mesh(mesh_of("2,2,1")), hax.axis_mapping({"vocab": "fsdp"}):
        assert assert_same_tokens(expected, other.generate(model, requests)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "moved"),
    [
        pytest.param("1,1,1", {}, False, marks=pytest.mark.nightly),
        pytest.param("4,1,1", {}, False, marks=pytest.mark.nightly),
        ("4,1,1", {"dtype": "bfloat16"}, True),
        ("1,1,4", {"layout": {"tensor": 4}}, False),
        ("1,4,1", {}, True),
    ],
)
def test_weights_that_lie_right_are_not_copied(mesh: str, options: dict[str, Any], moved: bool) -> None:
    config = dataclasses.replace(LLAMA, num_kv_heads=4)
    engine, model = Engine(EngineConfig(**options), mesh_of(mesh)), model_on(mesh, config)
    requests = [request(0, 9, 4), request(1, 20, 4, temperature=0.8)]
    got = engine.generate(model, requests)
    assert ("reshard" in engine.programs) == moved
    if "dtype" not in options:
        assert assert_same_tokens(oracle_completions(model, requests), got) == 0


@pytest.mark.slow
def test_capacities_grow_once_and_never_shrink() -> None:
    engine, model = Engine(EngineConfig(page_size=8), mesh_of("1,1,1")), model_on("1,1,1")
    small, large = [request(0, 5, 3)], [request(i, 30, 9, stop_token_ids=tuple(range(30, 35))) for i in range(3)]
    compiled = []
    for requests in (small, large, small, large):
        engine.generate(model, requests)
        if not compiled or compiled[-1] is not engine.programs["decode"]:
            compiled.append(engine.programs["decode"])
    assert len(compiled) == 2
    sizes = engine.sizes
    assert sizes is not None
    assert (sizes.slots, sizes.pages_per_sequence, sizes.pages, sizes.stop_ids, sizes.steps) == (3, 5, 16, 8, 9)


@pytest.mark.slow
def test_a_model_that_lies_elsewhere_is_compiled_for_again_and_never_run_unprepared(model: Any) -> None:
    requests = [request(0, 9, 4)]
    engine = Engine(EngineConfig(), mesh_of("1,2,2"))
    expected = engine.generate(model, requests)
    moved = eqx.tree_at(
        lambda m: m.embed.array,
        model,
        jax.device_put(model.embed.array, jax.sharding.NamedSharding(mesh_of("1,2,2"), jax.sharding.PartitionSpec())),
    )
    launches = len(engine.ledger.launches)
    with pytest.raises(ConfigError, match="are not those that the engine prepared for. Call prepare with this model"):
        next(engine.stream(moved, requests))
    assert len(engine.ledger.launches) == launches
    before = engine.programs["decode"]
    assert engine.generate(moved, requests) == expected
    assert engine.programs["decode"] is not before


@pytest.mark.slow  # for TPUs: tests/tpu_compile/test_kv_pool.py
def test_the_cache_is_written_in_place() -> None:
    # 32 layers, so that a copy of the pool would show beside what attention gathers of one layer.
    config = dataclasses.replace(LLAMA, max_seq_len=256, num_layers=32)
    model = model_on("1,1,1", config)
    engine = Engine(EngineConfig(max_seq_len=256, max_steps_per_launch=4), mesh_of("1,1,1"))
    engine.prepare(model, [request(i, 20, 8) for i in range(8)])
    sizes = engine.sizes
    assert sizes is not None
    pool = 32 * sizes.pages * sizes.page_size * 2 * config.num_kv_heads * config.head_size * 4
    for name in ("prefill", "decode"):
        memory = engine.programs[name].memory()
        print(f"{name}: pool {pool}, aliased {memory.alias_size_in_bytes}, temporaries {memory.temp_size_in_bytes}")
        assert memory.alias_size_in_bytes == pool
        # Decode lays the context out end to end once per launch; beyond that nothing of the pool is copied.
        laid_out = pool if name == "decode" else 0
        assert memory.temp_size_in_bytes - laid_out < pool / 2


REFUSED: list[tuple[dict[str, Any], list[Request], type[Exception], str]] = [
    ({}, [], ConfigError, "there are 0 requests; the engine needs at least 1"),
    ({}, [request(4, 3), request(4, 5)], ConfigError, "prompt_id 4 is used by several requests"),
    ({}, [request(0, (1, 2)), request(2**32, (1,))], ConfigError, "prompt_id is 4294967296; it must be at least 0 and"),
    ({}, [request(-1, (1,))], ConfigError, "prompt_id is -1; it must be at least 0"),
    ({}, [request(3, (1, VOCAB))], PromptError, "token 1 of prompt 3 is 40; the model's vocabulary has ids 0 to 39"),
    ({}, [request(3, (-1, 2))], PromptError, "token 0 of prompt 3 is -1"),
    ({}, [request(3, 5, stop_token_ids=(2, 99))], ConfigError, "stop_token_ids of prompt 3 has 99; the model's vocab"),
    (
        {},
        [request(3, 60, 8)],
        CapacityError,
        r"prompt 3 has 60 tokens and max_new_tokens is 8, 68 together; the model allows 64\. "
        r"Shorten the prompt to at most 56 tokens, or lower max_new_tokens to at most 4\.",
    ),
    ({"max_seq_len": 16}, [request(3, 12, 8)], CapacityError, r"is 16 \(the .* 64\)\..* or raise max_seq_len to at le"),
    ({"max_seq_len": 8}, [request(3, 60, 60)], CapacityError, "Shorten the prompt and lower max_new_tokens"),
    ({"max_seq_len": 65}, [request(3, 5)], ConfigError, "max_seq_len of the engine is 65; the model was built for 64"),
    (
        {"max_pages": 3, "page_size": 8},
        [request(3, 17)],
        CapacityError,
        r"prompt 3 needs 3 pages of 8 tokens for its 17 prompt and 8 new tokens; a replica has 2 .* Raise max_pages to "
        r"at least 4, or shorten the prompt\.",
    ),
]


@pytest.mark.parametrize(("options", "requests", "error", "message"), REFUSED)
def test_refused_before_any_device_work(
    model: Any, options: dict[str, Any], requests: list[Request], error: type[Exception], message: str
) -> None:
    engine = Engine(EngineConfig(**options), mesh_of("1,2,2"))
    with compilations() as events, jax.no_execution(True):
        for call in (engine.check, engine.prepare):
            with pytest.raises(error, match=message):
                call(model, requests)
        if requests:
            with pytest.raises(LockstepError, match=message):
                engine.generate(model, requests)
    assert not events and engine.sizes is None and not engine.ledger.launches


def test_a_layout_that_does_not_fit_the_mesh() -> None:
    with pytest.raises(ConfigError, match=r"layout \{tensor: 3\} does not fit the mesh .* to one of \[1, 2, 4"):
        Engine(EngineConfig(layout={"tensor": 3}), mesh_of("1,4,1"))


def test_a_vocabulary_of_nothing() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 0; at least 1 token must be allowed"):
        Engine(EngineConfig(), mesh_of("1,4,1"), vocab_size=0)


def test_a_model_in_host_memory_or_on_another_mesh(model: Any) -> None:
    engine = Engine(EngineConfig(), mesh_of("1,2,2"))
    with pytest.raises(ConfigError, match=r"the weight embed is placed in host memory; programs take"):
        engine.prepare(jax.tree.map(np.asarray, model), [request(0, 3)])
    with pytest.raises(ConfigError, match=r"the weight embed is placed on 4 devices .* the training mesh"):
        engine.prepare(model_on("1,4,1"), [request(0, 3)])


def test_a_launch_that_fails_is_known_to_all(engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "stream", fail)
    with pytest.raises(LockstepError, match="out of memory"):
        engine.generate(model, [request(0, 3)], hosts=current())


def test_prompts_stream_through() -> None:
    model, requests = model_on("1,2,1"), mixed_requests()
    engine = Engine(EngineConfig(max_prompts_per_batch=2, max_steps_per_launch=5, page_size=8), mesh_of("1,2,1"))
    with pytest.raises(AssertionError, match="prepare"):
        next(engine.stream(model, requests))
    engine.prepare(model, requests)
    sizing = engine.sizing
    assert sizing is not None
    # Two prompts at a time have at most 3 + 2 sequences.
    assert sizing.sizes.sequences == 5 and sizing.reasons["max_seqs"] == (5, "max_prompts_per_batch")
    assert sizing.reasons["max_prompts_per_batch"] == (2, "cap given")
    assert "max_prompts_per_batch 2: cap given" in sizing.describe()
    compiled, live, read = engine.compilations, len(live_arrays()), []

    def source():
        for one in requests:
            read.append(one.prompt_id)
            yield one

    parts, known = [], []
    for part in engine.stream(model, source()):
        parts += part
        known.append(len(read))
    assert known[0] < len(requests) and len(known) > 2, "all was read before anything was answered"
    assert engine.compilations == compiled and len(live_arrays()) == live
    order = {one.prompt_id: at for at, one in enumerate(requests)}
    parts.sort(key=lambda c: (order[c.prompt_id], c.generation_id))
    assert assert_same_tokens(oracle_completions(model, requests), parts) == 0
    assert engine.generate(model, requests) == parts

    gc.collect()  # what the oracle left behind
    live = len(live_arrays())
    closed = engine.stream(model, requests)
    next(closed)
    assert len(live_arrays()) > live
    closed.close()
    assert len(live_arrays()) == live, "an iterator that is closed leaves its cache behind"


def test_what_was_not_prepared_for_is_refused_when_it_is_read() -> None:
    model, first = model_on("1,1,1"), request(0, 5, 4)
    engine = Engine(EngineConfig(max_prompts_per_batch=1), mesh_of("1,1,1"))
    engine.prepare(model, [first])
    for second, error, text in (
        (request(0, 5, 4), ConfigError, "prompt_id 0 is used by several requests"),
        (request(1, (99,), 4), PromptError, "token 0 of prompt 1 is 99"),
        (request(1, 40, 8), CapacityError, "prompt 1 has 40 tokens .* max_seq_len is 16"),
    ):
        with pytest.raises(error, match=text):
            list(engine.stream(model, [first, second]))


@pytest.mark.slow
def test_the_experts_of_tokens_are_those_of_the_training_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone = model_on("1,2,2", FAMILIES["experts"]), model_on("1,1,1", FAMILIES["experts"])
    routed = [
        dataclasses.replace(each, params=dataclasses.replace(each.params, routed_experts=True))
        for each in mixed_requests()
    ]
    config = EngineConfig(layout={"tensor": 2}, page_size=8, max_seqs=4, max_steps_per_launch=5)
    plain = Engine(config, mesh_of("1,2,2")).generate(model, mixed_requests())
    found = Engine(config, mesh_of("1,2,2")).generate(model, routed)
    assert [dataclasses.replace(each, routed_experts=None) for each in found] == plain
    answers = [tuple(each.tokens for each in found if each.prompt_id == one.prompt_id) for one in routed]
    drafted = [
        dataclasses.replace(one, drafts=Drafts(answers=answer)) for one, answer in zip(routed, answers, strict=True)
    ]
    engine = Engine(config, mesh_of("1,2,2"))
    verified = engine.generate(model, drafted)
    assert any(name.startswith("verify") for name in engine.ledger.launches)
    chosen: list[np.ndarray] = []

    def recorded(*args: Any, **options: Any) -> Routing:
        routing = route(*args, **options)
        jax.debug.callback(lambda experts: chosen.append(np.asarray(experts)), routing.experts, ordered=True)
        return routing

    monkeypatch.setattr("lockstep.models.llama_mlp.route", recorded)
    prompts = {one.prompt_id: one.prompt_tokens for one in routed}
    rows = np.zeros((len(found), 64), np.int32)
    for row, each in zip(rows, found, strict=True):
        row[: len(prompts[each.prompt_id]) + len(each.tokens)] = (*prompts[each.prompt_id], *each.tokens)
    jax.block_until_ready(eqx.filter_jit(alone)(hax.named(rows, ("batch", "position"))))
    jax.effects_barrier()
    expected = np.stack(chosen, axis=1).reshape(*rows.shape, 2, -1)
    for each, same, experts in zip(found, verified, expected, strict=True):
        prompt = len(prompts[each.prompt_id])
        experts[: prompt - 1, -1] = -1  # of a prompt's last layer K and V are enough
        assert each.routed_experts is not None and each.routed_experts == same.routed_experts
        np.testing.assert_array_equal(each.routed_experts.numbers(), experts[: prompt + len(each.tokens) - 1])


def test_experts_of_a_model_without_any_are_refused(engine: Engine, model: Any) -> None:
    with pytest.raises(ConfigError, match=r"routed_experts of prompt 0 is true; the model has no experts"):
        engine.check(model, [request(0, 3, routed_experts=True)])


@pytest.mark.parametrize(
    "numerics", ["fast", pytest.param("exact", marks=(pytest.mark.nightly, pytest.mark.optimized))]
)
def test_turns_have_the_same_tokens_whenever_they_come(numerics: str) -> None:
    """K/V that was kept, or taken away and prefilled again; in exact numerics log-probabilities have the same bits."""
    model = model_on("1,2,1", dataclasses.replace(LLAMA, numerics=numerics))
    prompts = [tuple(range(1, 12)), tuple(range(1, 14)), tuple(range(3, 12))]
    runs, engines = [], {}
    # One at a time, with pages for little more than one; and all at once, in two orders of replies.
    for delays, most in (([2], 1), ([0], 3), ([4, 0, 2], 3)):
        talk = Talk(prompts, [3, 3, 2], said=(5, 4, 2, 7), new=7, temperature=0.7, seed=5)
        config = EngineConfig(page_size=8, max_seq_len=48, max_steps_per_launch=3, max_seqs=most)
        engine = engines.setdefault(most, Engine(config, mesh_of("1,2,1")))
        engine.prepare(model, [request(number, 41, 7, stop_token_ids=(3,), temperature=0.7) for number in range(3)])
        schedulers: list[Scheduler] = []
        replies = itertools.cycle(delays)
        for answered in engine.stream(model, iter(talk), gate=Gate(observer=Between(schedulers.append))):
            talk.answered(schedulers[-1], answered, replies)
        runs.append([completion for _, (_, completion) in sorted(talk.answers.items())])
        counts = schedulers[-1].counts
        assert (counts.prefilled_again > 0) == (most == 1) and len(runs[-1]) == 8
    requests = [turn for _, (turn, _) in sorted(talk.answers.items())]
    first, *later = runs
    assert assert_same_tokens(oracle_completions(model, requests), first) == 0
    for completions in later:
        assert [completion.tokens for completion in completions] == [completion.tokens for completion in first]
        assert numerics == "fast" or completions == first
