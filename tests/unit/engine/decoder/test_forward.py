"""`numerics: exact`: decode, verify, prompt log-probabilities and the training forward have the same bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig, audit
from lockstep.engine.decode_model import check_exact_platform
from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, Variant
from lockstep.training.objectives.logprobs import token_logprobs
from lockstep.types import Completion, Drafts, Request
from tests.unit.engine.models import FAMILIES, LLAMA, VOCAB, in_bfloat16, mesh_of, model_on, request

EXACT = dataclasses.replace(LLAMA, numerics="exact")
REQUESTS = [
    request(0, 3, 9, n_generations=2),
    request(1, 40, 12, temperature=0.7, seed=3, n_generations=2),
    request(2, 17, 12, temperature=1.3, seed=4, prompt_logprobs=True),
]
type Bits = dict[tuple[int, int], tuple[tuple[int, ...], tuple[bytes, ...]]]


def model_of(mesh: str, dtype: str, config: LlamaConfig = EXACT) -> Any:
    model = model_on(mesh, config)
    return in_bfloat16(model) if dtype == "bfloat16" else model


def bits_of(completions: list[Completion]) -> Bits:
    return {
        (each.prompt_id, each.generation_id): (
            each.tokens,
            tuple(np.float32(one).tobytes() for one in (*each.logprobs, *(each.prompt_logprobs or ())[1:])),
        )
        for each in completions
    }


def trainer_bits(mesh: str, model: Any, completions: list[Completion], requests: list[Request]) -> Bits:
    """The same from the training forward on a mesh, all rows at once."""
    prompts = {each.prompt_id: each.prompt_tokens for each in requests}
    rows = [(*prompts[each.prompt_id], *each.tokens) for each in completions]
    tokens = np.zeros((-(-len(rows) // 4) * 4, max(map(len, rows))), np.int32)
    for row, known in zip(tokens, rows, strict=False):
        row[: len(known)] = known
    with jax.set_mesh(mesh_of(mesh)):
        found = np.asarray(jax.jit(lambda model, tokens: token_logprobs(model, {"tokens": tokens}))(model, tokens))
    bits: Bits = {}
    for row, each in zip(found, completions, strict=False):
        first = len(prompts[each.prompt_id]) - 1
        wanted = [*row[first : first + len(each.tokens)], *(row[:first] if each.prompt_logprobs else ())]
        bits[each.prompt_id, each.generation_id] = each.tokens, tuple(one.tobytes() for one in wanted)
    return bits


def completed(mesh: str, model: Any, requests: list[Request] = REQUESTS, **engine: Any) -> list[Completion]:
    return Engine(EngineConfig(**engine), mesh_of(mesh)).generate(model, requests)


def test_engine_and_trainer_have_the_same_bits() -> None:
    """In bfloat16; more of it is slow."""
    answers = completed("1,1,2", model_of("1,1,2", "bfloat16"), REQUESTS[:2], layout={"tensor": 2})
    assert trainer_bits("2,1,1", model_of("2,1,1", "bfloat16"), answers, REQUESTS[:2]) == bits_of(answers)


ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("1,1,1", {"page_size": 16, "max_seqs": 1}),
    ("1,1,1", {"page_size": 4, "max_prefill_size": 8}),
    ("1,2,2", {"layout": {"tensor": 4}}),
    ("2,1,2", {"layout": "training", "page_size": 32}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in ("llama", "tied", "qwen2", "qwen3", "gemma3")),
        ("llama", "float32"),
    ],
)
def test_all_that_is_not_in_the_promise_changes_no_bit(family: str, dtype: str) -> None:
    """Batch, pages, chunks, tensor groups, the training layout, and the mesh of training."""
    exact = dataclasses.replace(FAMILIES[family], numerics="exact")
    answers = completed("1,1,1", model_of("1,1,1", dtype, exact), page_size=8, max_seqs=3)
    bits = bits_of(answers)
    for mesh, engine in ENGINES:
        assert bits_of(completed(mesh, model_of(mesh, dtype, exact), **engine)) == bits, (mesh, engine)
    for mesh in ("1,1,1", "1,4,1", "2,1,2"):
        assert trainer_bits(mesh, model_of(mesh, dtype, exact), answers, REQUESTS) == bits, mesh


@pytest.mark.slow
def test_drafts_and_an_audit_find_the_same_bits() -> None:
    model = model_of("1,2,1", "bfloat16")
    plain = completed("1,2,1", model)
    answers = {number: [each.tokens for each in plain if each.prompt_id == number] for number in (0, 1, 2)}
    guesses = {number: tuple((*tokens[:5], 1, *tokens[6:]) for tokens in each) for number, each in answers.items()}
    drafted = [dataclasses.replace(each, drafts=Drafts(answers=guesses[each.prompt_id])) for each in REQUESTS]
    assert bits_of(completed("1,2,1", model, drafted)) == bits_of(plain)
    assert audit(model, REQUESTS, plain).logprob_gap == 0.0


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        ({"kv_cache_dtype": "fp8"}, "numerics is exact and kv_cache_dtype is fp8"),
        ({"weight_dtype": "int8"}, "numerics is exact and weight_dtype is int8"),
    ],
)
def test_an_engine_that_rounds_what_the_trainer_does_not_is_refused(engine: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Engine(EngineConfig(**engine), mesh_of("1,1,1")).check(model_of("1,1,1", "bfloat16"), REQUESTS)


def test_a_platform_without_proof_is_refused() -> None:
    check_exact_platform("cpu")
    with pytest.raises(ConfigError, match="numerics is exact, which runs on CPU only until now, not on tpu"):
        check_exact_platform("tpu")


def test_float32_is_refused_but_for_llama() -> None:
    model = model_of("1,1,1", "float32", dataclasses.replace(FAMILIES["qwen2"], numerics="exact"))
    with pytest.raises(ConfigError, match="has this model in bfloat16 only, not float32"):
        Engine(EngineConfig(), mesh_of("1,1,1")).check(model, REQUESTS)


def test_packed_rows_are_refused() -> None:
    batch = {name: jax.ShapeDtypeStruct((2, 8), jnp.int32) for name in ("tokens", "segment_ids")}
    with pytest.raises(ConfigError, match="rows are packed with several documents"):
        jax.eval_shape(lambda batch: token_logprobs(model_of("1,1,1", "float32"), batch), batch)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (FAMILIES["experts"], "experts is set"),
        (FAMILIES["gemma"], "variant.attention_soft_cap is 2.0"),
        (FAMILIES["olmo"], "variant.pre_norm is False"),
        (FAMILIES["apertus"], "variant.activation is xielu"),
        (FAMILIES["sinks"], "variant.attention_sinks is True"),
        (dataclasses.replace(LLAMA, variant=Variant(activation="gelu_tanh")), "variant.activation is gelu_tanh"),
        (dataclasses.replace(FAMILIES["gemma3"], qk_norm=False), "variant.activation is gelu_tanh"),
        (dataclasses.replace(LLAMA, qk_norm=True, variant=Variant(norm_plus_one=True)), "variant.activation is silu"),
    ],
)
def test_what_is_not_exact_is_refused(config: LlamaConfig, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"numerics is exact and {setting}, which is not exact yet"):
        dataclasses.replace(config, numerics="exact")


@pytest.mark.slow
def test_the_gradient_is_that_of_the_fast_forward() -> None:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 12)), jnp.int32)

    def gradient(config: LlamaConfig) -> Any:
        model = model_of("1,1,1", "bfloat16", config)
        return jax.jit(jax.grad(lambda model: jnp.sum(token_logprobs(model, {"tokens": tokens}))))(model)

    for exact, fast in zip(*(jax.tree.leaves(gradient(each)) for each in (EXACT, LLAMA)), strict=True):
        np.testing.assert_array_equal(exact, fast)
