"""Company, order, engine and model are drawn; the tokens are always the oracle's."""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lockstep.engine import Engine
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.combinations import CONFIGS, Case, answer, check, pool
from tests.unit.engine.models import FAMILIES, mesh_of, model_on
from tests.unit.engine.random_engines import random_case

TOKENS_PER_TIE = 1000
"""After a tie the rest of an answer cannot be compared: with more of them the comparison would mean little."""

RANDOM_ENGINES = int(os.environ.get("RANDOM_ENGINES", "40"))
"""Whole engines to draw, each another model: `make slow` draws some of each depth, with experts and without, and
`make nightly` the rest, because each takes seconds to compile."""
IN_SLOW = (2, 4, 5, 9)
"""Experts gathered at each step (1, 3), split by their width (5), and shared out whole (9)."""

orders = st.lists(st.sampled_from(range(len(pool()))), min_size=1, max_size=len(pool()), unique=True)


@pytest.mark.nightly
def test_tokens_depend_on_the_request_alone_in_every_family_and_layout() -> None:
    tokens, ties = [], []

    @settings(max_examples=200, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
    @given(st.sampled_from(sorted(FAMILIES)), st.integers(0, len(CONFIGS) - 1), orders)
    def run(family: str, config: int, prompts: list[int]) -> None:
        case = Case(family, config, tuple(prompts))
        got = answer(case)
        ties.append(check(case, got))
        tokens.append(sum(len(completion.tokens) for completion in got))

    each: Callable[[], None] = run
    each()
    print(f"{sum(ties)} ties in {sum(tokens)} tokens of {len(ties)} cases")
    assert len(ties) == 200 and sum(ties) <= sum(tokens) / TOKENS_PER_TIE


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n not in IN_SLOW)) for n in range(RANDOM_ENGINES)],
)
def test_a_random_engine_answers_as_a_plain_forward(number: int) -> None:
    case = random_case(number)
    model = model_on(case.mesh, case.model, case.vocab)
    want = oracle_completions(model, case.requests, length=case.model.max_seq_len)
    got = Engine(case.engine, mesh_of(case.mesh)).generate(model, case.requests)
    ties = assert_same_tokens(want, got)
    assert ties <= 1, "a second tie in so few tokens is an error"
    if not ties:
        assert_same_logprobs(want, got)
