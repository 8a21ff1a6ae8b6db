"""Tokens and log-probabilities equal those of full forward passes, whatever the model, layout and capacities."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig, decode_model
from lockstep.engine.decoder import experts
from lockstep.models import Experts, mixture, part_lanes
from lockstep.models.block import xielu
from lockstep.types import Completion, FinishReason
from tests.oracle import Expected, assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import FAMILIES, LLAMA, VOCAB, mesh_of, mixed_requests, model_on, request

LAYOUTS: dict[str, Any] = {"tensor1": {"tensor": 1}, "training": "training", "tensor2": {"tensor": 2}}
# Spread over the families, so that each family and each layout meets several: page sizes, prefill in chunks, few
# sequences, few pages, short launches.
OPTIONS: list[dict[str, int]] = [
    {"page_size": 8, "max_prefill_size": 8, "max_steps_per_launch": 5, "max_seqs": 6},
    {"page_size": 16, "max_steps_per_launch": 1, "max_seqs": 3},
    {"page_size": 8, "max_steps_per_launch": 64, "max_pages": 9},
    {"page_size": 16, "max_prefill_size": 32, "max_steps_per_launch": 5, "max_pages": 5},
    {},
]
MESHES = {"tensor1": ("1,4,1", "2,2,1"), "training": ("1,2,2", "2,2,1"), "tensor2": ("1,2,2", "1,4,1")}
COLLECTIVE = re.compile(r"= \S+ (?:all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)\(")
QUICK = {"qwen3": ("training",)}
"""Layouts of the families that `make test` runs, which has Llama on two devices by its vocabulary, below."""
SLOW = {"gemma3": ("tensor2",), "mixed": ("training",), "latent": ("tensor2",)}
"""Those of `make slow`, which has gpt-oss on two devices in tests/unit/models/families. The rest are nightly."""


def marks(family: str, layout: str) -> list[pytest.MarkDecorator]:
    if layout in QUICK.get(family, ()):
        return []
    return [pytest.mark.slow] if layout in SLOW.get(family, ()) else [pytest.mark.nightly]


CASES = [
    pytest.param(
        family, layout, MESHES[layout][i % 2], OPTIONS[(i + 2 * j) % len(OPTIONS)], marks=marks(family, layout)
    )
    for i, family in enumerate(FAMILIES)
    for j, layout in enumerate(LAYOUTS)
]


@functools.cache
def expected(family: str, vocab: int, vocab_size: int | None = None) -> list[Expected]:
    return oracle_completions(model_on("1,4,1", FAMILIES[family], vocab), mixed_requests(), vocab_size=vocab_size)


def check(want: Sequence[Expected], got: Sequence[Completion]) -> None:
    ties = assert_same_tokens(want, got)
    worst = assert_same_logprobs(want, got)
    print(f"{ties} ties in {sum(len(e.tokens) for e in want)} tokens; log-probabilities differ by {worst:.1e} at most")


@pytest.mark.parametrize(("family", "layout", "mesh", "options"), CASES)
def test_every_family_and_layout(family: str, layout: str, mesh: str, options: dict[str, int]) -> None:
    # A vocabulary that two devices cannot share evenly, where the trainer does not split it.
    vocab = VOCAB - 1 if mesh == "1,4,1" else VOCAB
    engine = Engine(EngineConfig(layout=LAYOUTS[layout], **options), mesh_of(mesh))
    model, want = model_on(mesh, FAMILIES[family], vocab), expected(family, vocab)
    check(want, engine.generate(model, mixed_requests()))
    assert {program.traces for program in engine.programs.values()} == {1}
    # Other slots, other pages, other replicas, other company.
    turned = engine.generate(model, mixed_requests()[::-1])
    order = {(e.prompt_id, e.generation_id): e for e in want}
    check([order[c.prompt_id, c.generation_id] for c in turned], turned)
    assert {program.traces for program in engine.programs.values()} == {1}


@pytest.mark.parametrize(
    "vocab_size", [pytest.param(30, marks=pytest.mark.nightly), pytest.param(18, marks=pytest.mark.slow)]
)
def test_rows_beyond_the_vocabulary_are_never_sampled(vocab_size: int) -> None:
    # Two devices have 20 rows each: with 18 tokens the second has none that may be sampled.
    engine = Engine(EngineConfig(layout={"tensor": 2}, **OPTIONS[2]), mesh_of("1,2,2"), vocab_size=vocab_size)
    got = engine.generate(model_on("1,2,2"), mixed_requests())
    check(expected("llama", VOCAB, vocab_size), got)
    assert max(token for c in got for token in c.tokens) < vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("working", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_replicas_that_rest(working: int) -> None:
    options = {"page_size": 8, "max_prefill_size": 16, "max_steps_per_launch": 5, "max_seqs": 6}
    engine = Engine(EngineConfig(layout={"tensor": 1, "replicas": working}, **options), mesh_of("2,2,1"))
    check(expected("llama", VOCAB), engine.generate(model_on("2,2,1"), mixed_requests()))
    assert engine.sizes is not None and list(engine.sizes.active_replicas) == [0, 2][:working]
    # Nothing in a step waits for another device, so that each may take as many as it has work for: what there is of
    # collectives stands outside the loop, which has all of a launch but the exchange of its results.
    loops, entry = engine.programs["decode"].text().split("\nENTRY", 1)
    assert not COLLECTIVE.search(loops)
    assert len(COLLECTIVE.findall(entry)) == entry.count(" while(") == 1


@pytest.mark.slow
def test_one_device() -> None:
    engine = Engine(EngineConfig(), mesh_of("1,1,1"))
    check(expected("llama", VOCAB), engine.generate(model_on("1,1,1"), mixed_requests()))


@pytest.mark.slow
def test_a_model_with_one_layer() -> None:
    """Prefill runs all layers but the last, so that here it runs none before it writes K/V."""
    config = dataclasses.replace(LLAMA, num_layers=1)
    engine = Engine(EngineConfig(layout={"tensor": 2}, page_size=8, max_prefill_size=16), mesh_of("1,2,2"))
    want = oracle_completions(model_on("1,4,1", config), mixed_requests())
    check(want, engine.generate(model_on("1,2,2", config), mixed_requests()))


def test_the_oracle_sees_a_wrong_token() -> None:
    # The comparison itself: a wrong token, a missing one, a lost answer.
    want = oracle_completions(model_on("1,4,1"), [request(0, 5, 4)])
    (one,) = want

    def answer(tokens: tuple[int, ...]) -> list[Completion]:
        logprobs = one.logprobs[: len(tokens)]
        return [
            Completion(prompt_id=0, generation_id=0, tokens=tokens, logprobs=logprobs, finish_reason=one.finish_reason)
        ]

    assert assert_same_tokens(want, answer(one.tokens)) == 0
    with pytest.raises(AssertionError, match="token 1 is .* expected"):
        assert_same_tokens(want, answer((one.tokens[0], one.tokens[1] ^ 1, *one.tokens[2:])))
    with pytest.raises(AssertionError, match="3 tokens, 4 expected"):
        assert_same_tokens(want, answer(one.tokens[:-1]))
    with pytest.raises(AssertionError, match="answers are missing"):
        assert_same_tokens(want, [])


@pytest.mark.slow
@pytest.mark.parametrize("families", [[*QUICK, *SLOW], pytest.param([*FAMILIES], marks=pytest.mark.nightly)], ids=len)
def test_what_is_compared_has_both_endings_and_many_lengths(families: Sequence[str]) -> None:
    for family in families:
        want = expected(family, VOCAB)
        assert {e.finish_reason for e in want} == {FinishReason.STOP, FinishReason.LENGTH}, family
        assert len({e.tokens for e in want}) >= 8, family  # of 10; the greedy generations of a prompt are equal


def test_xielu_is_the_formula_of_the_paper() -> None:
    """Its integral of two pieces, of which each learns its curvature."""
    x, p, n, beta, eps = (jnp.float32(each) for each in ([-3.0, -0.5, 0.0, 0.5, 3.0], 0.3, -0.2, 0.5, -1e-6))
    up, down = np.log1p(np.exp(p)), beta + np.log1p(np.exp(n))
    want = np.where(x > 0, up * x**2 + beta * x, down * (np.exp(x) - 1 - x) + beta * x)
    np.testing.assert_allclose(xielu(x, p, n, beta, eps), want, rtol=1e-5, atol=2e-6)


@pytest.mark.nightly  # in make slow: the parts of experts
@pytest.mark.parametrize(
    ("family", "mesh"),
    [("qwen2", "1,4,1"), ("sinks", "1,4,1"), *((family, "1,2,2") for family in ("llama", "gemma", "olmo"))],
)
def test_more_devices_than_kv_heads(family: str, mesh: str) -> None:
    """Each of the two kv heads lies on two devices, which share its query heads."""
    engine = Engine(EngineConfig(layout={"tensor": 4}, page_size=8, max_steps_per_launch=5), mesh_of(mesh))
    check(expected(family, VOCAB), engine.generate(model_on(mesh, FAMILIES[family]), mixed_requests()))
    assert engine.sizing is not None and engine.sizing.compiled is not None and engine.sizes is not None
    position = FAMILIES[family].num_layers * 2 * FAMILIES[family].head_size * 4  # one kv head on a device, float32
    assert engine.sizing.compiled.pool == engine.sizes.pages * engine.sizes.page_size * position
    assert 0 <= engine.sizing.compiled.weights - engine.sizing.predicted.weights < 256, "pointers of the results"


@pytest.mark.slow
def test_slots_without_a_sequence_read_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def recorded(x: jax.Array, *given: Any, valid: jax.Array, **options: Any) -> jax.Array:
        jax.debug.callback(lambda count: seen.append((len(x), int(count))), valid.sum())
        return mixture(x, *given, valid=valid, **options)

    monkeypatch.setattr(experts, "mixture", recorded)
    engine = Engine(EngineConfig(page_size=8), mesh_of("1,1,1"))
    asked = [request(i, 3 + i, new) for i, new in enumerate((1, 2, 2, 5))]
    engine.generate(model_on("1,1,1", FAMILIES["experts"]), asked)
    jax.effects_barrier()
    decoded = [count for size, count in seen if size == len(asked)]
    assert sorted({*decoded}) == [1, 3, 4], "one ends after the first token, two after the second"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "tensor", "expert"),
    [
        *(pytest.param("1,2,2", 2, each, marks=pytest.mark.nightly) for each in ("whole", "part")),
        *(pytest.param("1,4,1", 4, each, marks=pytest.mark.nightly) for each in ("whole", "padded")),
        ("1,4,1", 4, "part"),
    ],
)
def test_tokens_are_the_same_with_whole_experts_and_parts(
    mesh: str, tensor: int, expert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 6 or 3 columns, which a TPU has in 128."""
    if expert == "padded":
        monkeypatch.setattr(decode_model, "part_lanes", lambda _: part_lanes("tpu"))
    experts = Experts(num_experts=8, num_experts_per_tok=3, intermediate_dim=12)
    config = dataclasses.replace(FAMILIES["experts"], experts=experts)
    layout = {"tensor": tensor, "expert": tensor if expert == "whole" else 1}
    engine, model = Engine(EngineConfig(layout=layout, page_size=8, max_seqs=6), mesh_of(mesh)), model_on(mesh, config)
    check(oracle_completions(model_on("1,1,1", config), mixed_requests()), engine.generate(model, mixed_requests()))
    assert engine.decode_model is not None and engine.decode_model.whole_experts == (expert == "whole")
    memory = engine.programs["reshard"].memory()
    assert memory.output_size_in_bytes == pytest.approx(engine.decode_model.copied_bytes, rel=0.02)
