"""The whole engine through the TPU attention kernel, interpreted on the CPU, gives the oracle's tokens."""

from typing import Any

import pytest

from lockstep.engine import Engine, EngineConfig
from tests.interpret import kernel_on_cpu
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import FAMILIES, mesh_of, mixed_requests, model_on

CASES: list[Any] = [
    ("qwen3", "1,2,2", {"tensor": 2}, {"page_size": 8, "max_prefill_size": 32, "max_seqs": 6}),
    pytest.param("llama", "1,2,1", {"tensor": 1}, {"page_size": 16, "max_pages": 9}, marks=pytest.mark.slow),
    pytest.param("tied", "1,2,2", "training", {"page_size": 8, "max_prefill_size": 8}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "mesh", "layout", "options"), CASES)
def test_tokens_through_the_kernel(family: str, mesh: str, layout: Any, options: dict[str, int]) -> None:
    want = oracle_completions(model_on("1,4,1", FAMILIES[family]), mixed_requests())
    with kernel_on_cpu():
        engine = Engine(EngineConfig(layout=layout, **options), mesh_of(mesh))
        got = engine.generate(model_on(mesh, FAMILIES[family]), mixed_requests())
    assert_same_tokens(want, got)
    assert_same_logprobs(want, got)
