"""Hypothesis draws company, order and engine; the tokens are always the oracle's."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.unit.engine.combinations import CONFIGS, Case, answer, check, pool
from tests.unit.engine.models import FAMILIES

QUICK = (("llama3", 0), ("qwen3", 1), ("tied", 3))
"""Family and configuration of what `make test` draws from."""
TOLD = {"cases": 0, "tokens": 0, "ties": 0}


def run(family: str, config: int, prompts: list[int]) -> None:
    case = Case(family, config, tuple(prompts))
    got = answer(case)
    TOLD["ties"] += check(case, got)
    TOLD["cases"] += 1
    TOLD["tokens"] += sum(len(c.tokens) for c in got)


orders = st.lists(st.sampled_from(range(len(pool()))), min_size=1, max_size=len(pool()), unique=True)
common = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}


@settings(max_examples=15, **common)
@given(st.sampled_from(QUICK), orders)
def test_tokens_depend_on_the_request_alone(which: tuple[str, int], prompts: list[int]) -> None:
    run(*which, prompts)


@pytest.mark.slow
@settings(max_examples=200, **common)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(0, len(CONFIGS) - 1), orders)
def test_tokens_depend_on_the_request_alone_in_every_family_and_layout(
    family: str, config: int, prompts: list[int]
) -> None:
    run(family, config, prompts)


def test_how_many_ties_there_were() -> None:
    print(f"{TOLD['ties']} ties in {TOLD['tokens']} tokens of {TOLD['cases']} cases")
    assert TOLD["cases"] == 0 or TOLD["tokens"] > 0
