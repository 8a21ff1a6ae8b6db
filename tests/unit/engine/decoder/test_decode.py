"""A sequence whose numbers overflow spoils itself and nobody else, also not those who get its pages after it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.placement import place
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import mesh_of, model_on, request

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
