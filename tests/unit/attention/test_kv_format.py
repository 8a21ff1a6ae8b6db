"""The KV cache in 8 bits: tokens are those of full forward passes over rounded K and V."""

from typing import Any

import haliax as hax
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions, rounded_kv
from tests.sampling_oracle import log_softmax
from tests.unit.engine.models import FAMILIES, mesh_of, mixed_requests, model_on, request

GAP = 0.1
"""Of log-probabilities from those over K and V as they are, in these models of 16 numbers per token."""


@pytest.mark.parametrize(
    ("family", "mesh", "layout", "options"),
    [
        ("qwen3", "1,2,2", {"tensor": 2}, {"page_size": 8, "max_prefill_size": 16, "max_steps_per_launch": 5}),
        pytest.param("llama3", "1,1,1", {"tensor": 1}, {"max_seqs": 1, "page_size": 16}, marks=pytest.mark.slow),
        pytest.param("gemma", "1,2,2", "training", {"page_size": 32, "share_prefixes": False}, marks=pytest.mark.slow),
    ],
)
def test_tokens_depend_on_the_request_alone(family: str, mesh: str, layout: Any, options: dict[str, Any]) -> None:
    model, requests = model_on(mesh, FAMILIES[family]), [*mixed_requests(), request(7, 34, 4, prompt_logprobs=True)]
    engine = Engine(EngineConfig(layout=layout, kv_cache_dtype="int8", **options), mesh_of(mesh))
    got = engine.generate(model, requests)
    assert ("copy_pages" in engine.programs) == options.get(
        "share_prefixes", True
    ) and "prompt_logprobs" in engine.programs
    want = oracle_completions(model, requests, int8_cache=True)
    ties, worst = assert_same_tokens(want, got), assert_same_logprobs(want, got)

    one, alone = requests[-1], model_on("1,1,1", FAMILIES[family])
    with rounded_kv():
        logits = alone(hax.named(np.asarray([one.prompt_tokens]), ("batch", "position"))).array
    rows = [log_softmax(np.asarray(row, np.float32)) for row in logits[0]][:-1]
    own = [float(row[token]) for row, token in zip(rows, one.prompt_tokens[1:], strict=True)]
    np.testing.assert_allclose(np.array(got[-1].prompt_logprobs[1:], float), own, rtol=0, atol=1e-5)

    # What rounding costs, and that it is there at all: the first tokens, for which both have seen the same.
    exact = oracle_completions(model, requests)
    gaps = [abs(e.logprobs[0] - c.logprobs[0]) for e, c in zip(exact, got, strict=True) if e.tokens[0] == c.tokens[0]]
    print(f"{ties} ties; log-probabilities differ by {worst:.1e}, from those of unrounded K and V by {max(gaps):.1e}")
    assert 1e-4 < max(gaps) < GAP
