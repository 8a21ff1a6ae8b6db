"""Tokens are the same whatever the draft says, and a sequence whose numbers overflow spoils nobody else."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.schedule import Scheduler
from lockstep.placement import place
from lockstep.types import Completion, Drafts, Request, SamplingParams
from tests.oracle import assert_same_but_for_near_ties, assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.combinations import CONFIGS, Case, check, expected, pool
from tests.unit.engine.models import FAMILIES, Between, in_bfloat16, many_requests, mesh_of, model_on, request

POISON = 39
"""A token that only the sick have in their prompts, and that nobody may sample."""


def poisoned(mesh: str, token: int = POISON) -> Any:
    """A model in which whoever reads ``token`` gets nothing but NaN from there on."""
    model = model_on(mesh)
    array = np.array(model.embed.array)
    array[token] = np.nan
    embed = dataclasses.replace(model.embed, array=place(array, model.embed.array.sharding))
    return dataclasses.replace(model, embed=embed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout", "page_size", "kv_cache_dtype"),
    [
        pytest.param("1,1,1", "auto", 8, "auto", marks=pytest.mark.nightly),
        ("1,2,2", {"tensor": 2}, 32, "auto"),
        pytest.param("1,2,1", "training", 16, "auto", marks=pytest.mark.nightly),
        ("1,1,1", "auto", 8, "fp8"),
    ],
)
def test_pages_of_a_poisoned_sequence_are_as_good_as_new(
    mesh: str, layout: Any, page_size: int, kv_cache_dtype: str
) -> None:
    model = poisoned(mesh)
    allowed = tuple(range(POISON))
    sick = [request(i, (*range(i, i + 9), POISON, *range(9 + i)), 30, allowed_token_ids=allowed) for i in range(6)]
    well = [
        request(10, 5, 12, n_generations=3, allowed_token_ids=allowed),
        request(11, 33, 12, temperature=0.8, seed=1, n_generations=2, allowed_token_ids=allowed),
        request(12, 12, 4, allowed_token_ids=allowed),
    ]
    # Three at a time on few pages: who is well gets pages of who is sick, in the company of who is sick.
    caps = {"page_size": page_size, "max_seqs": 3, "max_pages": 2 + 3 * 64 // page_size}
    config = EngineConfig(layout=layout, kv_cache_dtype=kv_cache_dtype, **caps)
    engine = Engine(config, mesh_of(mesh))
    order = [*sick[:2], well[0], sick[2], well[1], *sick[3:], well[2]]
    got = engine.generate(model, order)
    assert all(np.isnan(c.logprobs).all() for c in got if c.prompt_id < 6), "nobody is sick"
    want = oracle_completions(model, well, fp8_cache=kv_cache_dtype == "fp8")
    mine = [c for c in got if c.prompt_id >= 10]
    print(f"{assert_same_tokens(want, mine)} ties, log-probabilities differ by {assert_same_logprobs(want, mine):.1e}")


@pytest.mark.slow
def test_no_number_is_lost_where_a_page_is_not_full() -> None:
    # Tokens after the prompt on its last page are computed too: token 0 must not be one of them.
    healthy, model = model_on("1,1,1"), poisoned("1,1,1", 0)
    allowed = tuple(range(1, 40))
    requests = [request(i, prompt, 6, allowed_token_ids=allowed) for i, prompt in enumerate([(3, 4, 5, 6), (7, 8)])]
    got = Engine(EngineConfig(), mesh_of("1,1,1")).generate(model, requests)
    assert assert_same_tokens(oracle_completions(healthy, requests), got) == 0


NEW = 30
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 7, "n_generations": 2},
    "filtered": {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "n_generations": 2},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "biased": {"logit_bias": ((3, 2.0), (7, -50.0)), "allowed_token_ids": tuple(range(1, 36)), "top_logprobs": 3},
    "stopped": {"temperature": 1.0, "stop_token_ids": (2, 9, 17), "min_tokens": 6},
}


@functools.cache
def engine_on(mesh: str, layout: str = "auto") -> Engine:
    return Engine(
        EngineConfig(layout={"tensor": 2} if layout == "tensor" else layout, page_size=8, max_seqs=4), mesh_of(mesh)
    )


def with_drafts(request: Request, answers: Sequence[Sequence[int]], *, ngrams: bool = False) -> Request:
    return dataclasses.replace(request, drafts=Drafts(answers=tuple(map(tuple, answers)), ngrams=ngrams))


@contextlib.contextmanager
def every_launch_verifies(monkeypatch: Any) -> Any:
    """As if a wide step took no longer than a narrow one."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "lockstep.engine.sizing.result.verify_costs", lambda sizes, _: dict.fromkeys(sizes.verify_widths, 0.01)
        )
        yield


def by_request(completions: Sequence[Completion]) -> dict[int, list[tuple[int, ...]]]:
    answers: dict[int, list[tuple[int, ...]]] = {}
    for each in completions:
        answers.setdefault(each.prompt_id, []).append(each.tokens)
    return answers


def assert_equal(want: Sequence[Completion], got: Sequence[Completion]) -> None:
    """The tokens are the same to the last one, log-probabilities to within rounding."""
    assert [(c.prompt_id, c.generation_id, c.tokens, c.finish_reason) for c in got] == [
        (c.prompt_id, c.generation_id, c.tokens, c.finish_reason) for c in want
    ]
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b.logprobs, a.logprobs, atol=1e-5)
        np.testing.assert_allclose(b.sampled_logprobs, a.sampled_logprobs, atol=1e-5)
        assert len(a.top_logprobs) == len(b.top_logprobs)
        for left, right in zip(a.top_logprobs, b.top_logprobs, strict=True):
            np.testing.assert_allclose([p for _, p in right], [p for _, p in left], atol=1e-5)


def scheduled(engine: Engine, model: Any, requests: Sequence[Request]) -> tuple[list[Completion], Scheduler]:
    """The answers, and the scheduler that made them."""
    seen: list[Scheduler] = []
    return engine.generate(model, requests, observer=Between(seen.append)), seen[-1]


@pytest.mark.parametrize(
    ("mesh", "layout", "names"),
    [
        ("1,1,1", "auto", ("greedy", "penalised", "stopped")),
        pytest.param("1,1,1", "auto", tuple(PARAMS), marks=pytest.mark.nightly),
        pytest.param("1,2,2", "tensor", tuple(PARAMS), marks=pytest.mark.nightly),
    ],
)
def test_right_and_wrong_drafts_give_the_same_tokens(
    mesh: str, layout: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = engine_on(mesh, layout), model_on(mesh)
    plain = [request(i, 3 + 6 * i, NEW, **PARAMS[name]) for i, name in enumerate(names)]
    want, before = scheduled(engine, model, plain)
    assert before.counts.steps == sum(before.counts.tokens)
    answers = by_request(want)
    right = [with_drafts(each, answers[each.prompt_id]) for each in plain]
    half = [with_drafts(r, [(*a[:11], 38, *a[12:20], 1, *a[20:]) for a in answers[r.prompt_id]]) for r in plain]
    wrong = [with_drafts(each, [(39,) * 50] * 2) for each in plain]
    with every_launch_verifies(monkeypatch):
        steps = []
        for drafted in (right, half, wrong):
            got, scheduler = scheduled(engine, model, drafted)
            assert_equal(want, got)
            steps.append(scheduler.counts.steps)
            assert sum(scheduler.counts.tokens) == sum(before.counts.tokens)
    assert steps[0] < steps[1] < steps[2] <= before.counts.steps
    assert steps[0] <= before.counts.steps / 5
    assert all(program.traces == 1 for program in engine.programs.values())
    assert {"verify_8", "verify_30"} <= set(engine.ledger.launches)


EVERY_LAYOUT = [(family, at % len(CONFIGS)) for at, family in enumerate([*FAMILIES, "llama", "gemma", "qwen2"])] + [
    ("experts", 6)
]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if pair == ("experts", 6) else pytest.mark.nightly)
        for pair in EVERY_LAYOUT
    ],
)
def test_every_family_and_layout_answers_as_a_full_forward(
    family: str, config: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third draft is right, the others from the second or third token on not; an fp8 cache among the layouts."""
    mesh, layout, options = CONFIGS[config]
    answers = expected(family, "kv_cache_dtype" in options)

    def draft(at: int, generation: int) -> tuple[int, ...]:
        tokens = answers[at, generation].tokens
        place = (at + generation) % 3
        return (*tokens[:place], 39, *tokens[place + 1 :]) if place else (*tokens, 5, 6)

    drafted = [
        with_drafts(each, [draft(each.prompt_id, g) for g in range(each.params.n_generations)], ngrams=True)
        for each in pool()
    ]
    options = {"max_seq_len": 64, "memory_bytes_per_device": 2**30, **options}
    engine = Engine(EngineConfig(layout=layout, **options), mesh_of(mesh))
    with every_launch_verifies(monkeypatch):
        got = engine.generate(model_on(mesh, FAMILIES[family]), drafted)
    check(Case(family, config, tuple(range(len(pool())))), got)
    assert any(name.startswith("verify_") for name in engine.ledger.launches)


@pytest.mark.slow
def test_a_draft_that_is_not_finite_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """V of a wrong draft is behind the mask of the queries before it, with weight 0; and 0 times NaN is NaN."""
    engine, model = engine_on("1,1,1"), poisoned("1,1,1")
    plain = [request(i, 9 + i, NEW, allowed_token_ids=tuple(range(POISON))) for i in range(3)]
    want = engine.generate(model, plain)
    assert all(np.isfinite(c.logprobs).all() for c in want)
    sick = [with_drafts(r, [(*c.tokens[:3], POISON, *c.tokens[4:9], POISON)]) for r, c in zip(plain, want, strict=True)]
    with every_launch_verifies(monkeypatch):
        assert_equal(want, engine.generate(model, sick))


@pytest.mark.nightly
def test_in_bfloat16_drafts_change_a_token_at_near_ties_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product over eight positions may be rounded in another way than one over one, as in another layout or batch."""
    model = model_on("1,2,2")
    want = oracle_completions(in_bfloat16(model), many_requests())
    answers: dict[int, list[tuple[int, ...]]] = {}
    for each in want:  # a token of every second prompt's answers is wrong
        wrong = (*each.tokens[:4], 39, *each.tokens[5:])
        answers.setdefault(each.prompt_id, []).append(wrong if each.prompt_id % 2 else each.tokens)
    engine = Engine(EngineConfig(dtype="bfloat16", layout={"tensor": 2}, page_size=8), mesh_of("1,2,2"))
    with every_launch_verifies(monkeypatch):
        got = engine.generate(model, [with_drafts(each, answers[each.prompt_id]) for each in many_requests()])
    assert any(name.startswith("verify_") for name in engine.ledger.launches)
    assert_same_but_for_near_ties(want, got)
    assert_same_logprobs(want, got, atol=0.1)


@pytest.mark.slow
def test_stop_strings_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut on the host after the launch is cut at the same token."""
    engine, model = engine_on("1,1,1"), model_on("1,1,1")
    params = SamplingParams(max_new_tokens=NEW, temperature=1.0, stop=("x",), n_generations=2)
    plain = [Request(prompt_id=i, prompt_tokens=(1, 2, i), params=params) for i in range(8)]

    def find_stop(tokens: Sequence[int], clean: int, _: Sequence[str], after: Sequence[int]) -> int | None:
        return next((at + 1 for at in range(max(0, clean - 1), len(tokens)) if tokens[at] % 11 == 3), None)

    want = engine.generate(model, plain, find_stop=find_stop)
    assert len({len(c.tokens) for c in want}) > 3
    answers = by_request(want)
    drafted = [with_drafts(each, [(*a, 5, 6, 7) for a in answers[each.prompt_id]]) for each in plain]
    with every_launch_verifies(monkeypatch):
        engine.prepare(model, drafted)
        got = [c for part in engine.stream(model, iter(drafted), find_stop=find_stop) for c in part]
    assert_equal(want, sorted(got, key=lambda c: (c.prompt_id, c.generation_id)))
