"""In bfloat16 the engine answers as a plain forward does, in every layout, until rounding decides a near-tie."""

from typing import Any

import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.types import Request
from tests.oracle import Expected, assert_same_but_for_near_ties, assert_same_logprobs, oracle_completions
from tests.unit.engine.models import in_bfloat16, many_requests, mesh_of, mixed_requests, model_on, request

pytestmark = pytest.mark.optimized

FILTERED = 24
"""Requests from this number on draw through filters."""


@pytest.fixture(scope="module")
def model() -> Any:
    return model_on("1,2,2")


def filtered_requests() -> list[Request]:
    """Sampled through each filter, and through all of them."""
    filters = ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 10, "top_p": 0.95, "min_p": 0.01})
    return [
        request(number, 1 + 7 * number % 40, 12, temperature=0.8, seed=number, n_generations=3, **filters[number % 4])
        for number in range(FILTERED, FILTERED + 12)
    ]


REQUESTS = [*many_requests(), *filtered_requests()]


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Expected]:
    return oracle_completions(in_bfloat16(model), REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param("training", {"page_size": 8}, marks=pytest.mark.nightly),
        pytest.param({"tensor": 1}, {"max_seqs": 7}, marks=pytest.mark.nightly),
        pytest.param(
            {"tensor": 2},
            {"max_seqs": 3, "page_size": 8, "max_prefill_size": 16, "max_steps_per_launch": 5},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"tensor": 4}, {"max_seqs": 5}),
    ],
    ids=str,
)
def test_answers_differ_at_near_ties_alone(
    model: Any, expected: list[Expected], layout: Any, options: dict[str, int]
) -> None:
    engine = Engine(EngineConfig(dtype="bfloat16", layout=layout, **options), mesh_of("1,2,2"))
    got = engine.generate(model, REQUESTS)
    assert_same_but_for_near_ties(expected, got)
    # Where a token is at the edge of a filter, the probability of every other one depends on whether it is kept.
    unfiltered = [each.prompt_id < FILTERED for each in expected]
    pairs = [pair for pair, compared in zip(zip(expected, got, strict=True), unfiltered, strict=True) if compared]
    assert_same_logprobs(*zip(*pairs, strict=True), atol=0.1)


@pytest.mark.nightly  # in make slow: answers at near ties
def test_parameters_in_bfloat16_are_computed_in_bfloat16(model: Any) -> None:
    cast = Engine(EngineConfig(dtype="bfloat16", layout="training"), mesh_of("1,2,2"))
    native = Engine(EngineConfig(layout="training"), mesh_of("1,2,2"))
    requests = mixed_requests()[:2]  # greedy: smaller programs
    assert native.generate(in_bfloat16(model), requests) == cast.generate(model, requests)
