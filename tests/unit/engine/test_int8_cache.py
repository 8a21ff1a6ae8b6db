"""The KV cache in 8 bits: tokens are those of full forward passes over rounded K and V; it takes half the memory."""

import dataclasses
from typing import Any

import haliax as hax
import numpy as np
import pytest
from jax.sharding import Mesh

from lockstep.callback import InferenceEvalConfig
from lockstep.engine import Engine, EngineConfig
from lockstep.engine.decode_model import DecodeModels
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.result import Sizing
from lockstep.errors import ConfigError
from lockstep.models import read_decoder
from lockstep.plan.topology import topology
from lockstep.types import SamplingParams
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions, rounded_kv
from tests.sampling_oracle import log_softmax
from tests.unit.engine.models import FAMILIES, LLAMA, mesh_of, mixed_requests, model_on, request

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


def choose(free: int, **options: Any) -> Sizing:
    """For a model with heads of 128 numbers and many layers, as large models have."""
    config = dataclasses.replace(LLAMA, head_dim=128, num_layers=16, max_seq_len=4096)
    params = SamplingParams(max_new_tokens=2000)
    requests = [dataclasses.replace(request(i, 64), params=params) for i in range(64)]
    engine = EngineConfig(dtype="bfloat16", **options)
    models = DecodeModels(engine, *read_decoder(model_on("1,1,1", config)), mesh_of("1,1,1"))
    return Chooser(config=engine, models=models, free=free).choose(requests)


def test_the_same_memory_has_nearly_twice_the_pages() -> None:
    roomy = choose(2**40), choose(2**40, kv_cache_dtype="int8")
    assert roomy[0].sizes == roomy[1].sizes
    assert roomy[1].predicted.pool / roomy[0].predicted.pool == (128 + 4) / (2 * 128)
    free = roomy[0].predicted.total // 4
    few, many = choose(free), choose(free, kv_cache_dtype="int8")
    assert few.reasons["max_seqs"][1] == many.reasons["max_seqs"][1] == "memory"
    assert many.sizes.pages > 1.8 * few.sizes.pages and many.predicted.total <= many.budget
    assert "KV cache in int8" in many.describe() and "KV cache in bfloat16" in few.describe()


def test_the_compiler_agrees_about_the_bytes() -> None:
    requests = [request(i, 40, 24) for i in range(32)]
    config = EngineConfig(kv_cache_dtype="int8", max_steps_per_launch=4, max_prefill_size=64)
    engine = Engine(config, mesh_of("1,1,1"))
    engine.prepare(model_on("1,1,1"), requests)
    sizing = engine.sizing
    assert sizing is not None and sizing.compiled is not None
    pages = LLAMA.num_layers * sizing.sizes.pages
    assert sizing.compiled.pool == sizing.predicted.pool == pages * 16 * 2 * LLAMA.num_kv_heads * (8 + 4)
    print(sizing.describe())
    assert sizing.compiled.temporaries <= 1.3 * sizing.predicted.temporaries
    for name in ("prefill", "decode"):
        assert engine.programs[name].memory().alias_size_in_bytes == sizing.compiled.pool, f"{name}: in place"


def test_values_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8'; it must be auto or int8\. Use auto"):
        EngineConfig(kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="inference_eval: kv_cache_dtype is 'int4'; it must be auto or int8"):
        InferenceEvalConfig(prompts=["x"], kv_cache_dtype="int4")
    assert InferenceEvalConfig(prompts=["x"], kv_cache_dtype="int8").engine_config(None).kv_cache_dtype == "int8"


def test_int8_is_refused_where_attention_is_a_kernel() -> None:
    pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")
    mesh = Mesh(np.array(topology("v5p-8").devices), ("fsdp",))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is int8 .* Set kv_cache_dtype to auto"):
        Engine(EngineConfig(kv_cache_dtype="int8"), mesh)
