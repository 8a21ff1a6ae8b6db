"""The same tokens on 1, 2 and 4 processes, in every layout and batch, as one process without a cache makes.

In bfloat16 the same but for near-ties, which are counted (`tests.oracle.BFLOAT16_TIE`).

The oracle runs in the test's own process: two hosts that agree on a wrong answer agree all the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.placement import make_mesh
from lockstep.types import Completion, FinishReason
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.oracle import (
    NEAR_TIES_PER_THOUSAND,
    assert_same_but_for_near_ties,
    assert_same_logprobs,
    assert_same_tokens,
    oracle_completions,
    rounded,
)

TIGHT = {"max_seqs": 3, "page_size": 8, "max_pages": 15, "max_prefill_size": 16, "max_steps_per_launch": 5}
"""Few slots, pages and steps: sequences wait their turn, prompts are prefilled in parts."""
HALF = {"dtype": "bfloat16"}
ROUNDED = {"weight_dtype": "int8"}


def all_requests(in_bfloat16=False, in_8_bits=False):
    greedy = tiny.requests(lengths=(1, 5, 17, 40))
    # In bfloat16 enough of them that a rate can be counted.
    sampled = tiny.requests(temperature=0.8, n_generations=24 if in_bfloat16 else 2, lengths=(3, 17, 33))
    features = {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": ((7, 2.0),),
        "allowed_token_ids": tuple(range(0, 64, 3)) + (7,),
        "min_tokens": 3,
        "top_logprobs": 2,
    }
    featured = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, **features))
        for r in tiny.requests(temperature=0.8, lengths=(5, 33))
    ]
    every = [
        dataclasses.replace(r, prompt_id=r.prompt_id + 100 * group)
        for group, requests in enumerate((greedy, sampled, featured))
        for r in requests
    ]
    return every[::4] if in_8_bits else every  # one of each group, for time


CASES = [
    (2, "auto", "auto", {}),
    (2, "1,2,2", {"tensor": 4}, HALF),
    (2, "1,2,2", {"tensor": 4, "context": 2}, TIGHT),
    (2, "host_local", {"tensor": 2}, {}),
    (2, "auto", "training", TIGHT),
    (2, "1,2,2", {"tensor": 2}, TIGHT),
    (2, "1,2,2", {"tensor": 2}, ROUNDED),
    (2, "auto", "training", TIGHT | {"weight_dtype": "fp8"}),
    (2, "auto", "training", TIGHT | HALF),
    (4, "host_local", {"tensor": 1}, {}),
    (4, "auto", {"tensor": 2}, TIGHT | HALF),
]
"""Processes, mesh, layout and engine options."""
IN_SLOW = 4


def answer(hosts, mesh_shape, layout, options):
    mesh = make_mesh(mesh_shape)
    model = (tiny.CONFIG, tiny.placed_weights(mesh))
    requests = all_requests("dtype" in options, "weight_dtype" in options)
    engine = Engine(EngineConfig(layout=layout, **options), mesh)
    straight = engine.generate(model, requests, hosts=hosts)
    # The batch order is another one, so slots and replicas are; draws must not depend on it.
    turned = engine.generate(model, requests[::-1], hosts=hosts)
    by_id = {(c.prompt_id, c.generation_id): c.tokens for c in turned}
    return {
        "completions": [dataclasses.asdict(completion) for completion in straight],
        "order_matters": sum(by_id[c.prompt_id, c.generation_id] != c.tokens for c in straight),
        "traces": [program.traces for program in engine.programs.values()],
        "ledger": str(engine.ledger),
    }


@functools.cache
def expected(in_bfloat16, weight_dtype):
    weights = tiny.numpy_weights()
    if weight_dtype:
        weights = rounded(weights, EngineConfig(weight_dtype=weight_dtype).quantized_dtype)
    if in_bfloat16:
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    return oracle_completions((tiny.CONFIG, weights), all_requests(in_bfloat16, bool(weight_dtype)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mesh", "layout", "options"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * (n >= IN_SLOW)) for n, case in enumerate(CASES)],
)
def test_tokens_are_those_of_one_process(processes, mesh, layout, options):
    in_bfloat16 = "dtype" in options
    want = expected(in_bfloat16, options.get("weight_dtype"))
    results = run_processes(answer, processes=processes, args=(mesh, layout, options), timeout_s=300)
    assert len({result["ledger"] for result in results}) == 1
    for result in results:
        got = [
            Completion(**c | {"tokens": tuple(c["tokens"]), "finish_reason": FinishReason(c["finish_reason"])})
            for c in result["completions"]
        ]
        if in_bfloat16:
            assert_same_but_for_near_ties(want, got)
            tokens = sum(len(one.tokens) for one in want)
            assert 1000 * result["order_matters"] <= NEAR_TIES_PER_THOUSAND * tokens, "of another order, too"
        else:
            assert assert_same_tokens(want, got) == 0, "random weights have no ties here"
            assert_same_logprobs(want, got)
            assert result["order_matters"] == 0
        assert set(result["traces"]) == {1}
