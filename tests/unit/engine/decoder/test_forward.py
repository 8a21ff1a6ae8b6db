"""`numerics: exact`: decode, verify, prompt log-probabilities and the training forward have the same bits."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep.engine import Engine, EngineConfig, audit
from lockstep.errors import ConfigError
from lockstep.models import Experts, LlamaConfig, LoraConfig, Variant, merge_lora, read_decoder
from lockstep.models.families.exaone4 import Exaone4Variant
from lockstep.models.families.glm4_moe import Glm4MoeConfig
from lockstep.models.rope import RotaryConfig, YarnScaling
from lockstep.placement import place
from lockstep.training.objectives.logprobs import token_logprobs
from lockstep.types import Drafts
from tests.adapters import GATE_UP, MLPS, with_adapters
from tests.exact import REQUESTS, bits_of, completed, model_of, trainer_bits
from tests.unit.engine.models import EXACT, FAMILIES, LLAMA, SIZES, VOCAB, in_bfloat16, mesh_of, request

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize(
    ("mesh", "tensor", "trained_on"),
    [("1,1,1", 1, "1,1,1"), pytest.param("1,1,2", 2, "2,1,1", marks=pytest.mark.nightly)],
)
def test_engine_and_trainer_have_the_same_bits(mesh: str, tensor: int, trained_on: str) -> None:
    """In bfloat16; more of it is nightly."""
    answers = completed(mesh, model_of(mesh, "bfloat16"), REQUESTS[:2], layout={"tensor": tensor})
    assert trainer_bits(trained_on, model_of(trained_on, "bfloat16"), answers, REQUESTS[:2]) == bits_of(answers)


ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("1,1,1", {"page_size": 16, "max_seqs": 1}),
    ("1,1,1", {"page_size": 4, "max_prefill_size": 8}),
    ("1,2,2", {"layout": {"tensor": 4}}),
    ("2,1,2", {"layout": "training", "page_size": 32}),
]
EXPERT_ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("1,2,2", {"layout": {"tensor": 2}, "max_seqs": 5}),
    ("1,2,2", {"layout": {"tensor": 2, "expert": 1}}),
]
"""Whole experts on devices, where their number allows it, and a part of the width of each."""


MODELS = {name: FAMILIES[name] for name in EXACT} | {
    "gemma2": dataclasses.replace(FAMILIES["gemma"], qk_norm=False),
    "mistral": dataclasses.replace(LLAMA, variant=Variant(sliding_window=6)),
    "phi": dataclasses.replace(
        LLAMA, rope=RotaryConfig(theta=100.0, partial_rotary_factor=0.5), variant=Variant(sliding_window=6)
    ),
    "glm": dataclasses.replace(
        LLAMA, rope=RotaryConfig(theta=100.0, partial_rotary_factor=0.5), variant=Variant(interleaved_rope=True)
    ),
    "glm_moe": Glm4MoeConfig(
        **SIZES,
        qkv_bias=True,
        qk_norm=True,
        rope=RotaryConfig(theta=100.0, partial_rotary_factor=0.5),
        experts=dataclasses.replace(FAMILIES["latent"].experts, groups=1, groups_per_tok=1, routed_scaling_factor=2.5),
    ),
    "ministral": dataclasses.replace(
        LLAMA, rope=RotaryConfig(yarn=YarnScaling(original_max_position_embeddings=8, llama_4_scaling_beta=0.5))
    ),
    "mistral4": dataclasses.replace(
        FAMILIES["latent"],
        rope=RotaryConfig(yarn=YarnScaling(original_max_position_embeddings=8, llama_4_scaling_beta=0.5)),
        experts=dataclasses.replace(FAMILIES["latent"].experts, scoring="softmax", groups=1, groups_per_tok=1),
    ),
    "hunyuan": dataclasses.replace(LLAMA, qk_norm=True, variant=Variant(norm_after_rope=True)),
    "granite": dataclasses.replace(
        LLAMA, variant=Variant(embed_scale=3.0, attention_scale=0.3, residual_scale=0.7, logit_scale=0.6)
    ),
    "smollm": dataclasses.replace(LLAMA, num_layers=3, variant=Variant(no_rope_every=2)),
    "exaone": dataclasses.replace(
        LLAMA, qk_norm=True, variant=Exaone4Variant(sliding_window=6, full_attention_every=2)
    ),
    "gelu": dataclasses.replace(LLAMA, variant=Variant(activation="gelu")),
    "relu": dataclasses.replace(LLAMA, variant=Variant(activation="relu")),
    "arcee": dataclasses.replace(LLAMA, variant=Variant(activation="relu2")),
}
ALL = {(family, dtype) for family in MODELS for dtype in ("bfloat16", "float32")}


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "dtype"), sorted(ALL))
def test_all_that_is_not_in_the_promise_changes_no_bit(family: str, dtype: str) -> None:
    """Batch, pages, chunks, tensor groups, the training layout, and the mesh of training."""
    exact = dataclasses.replace(MODELS[family], numerics="exact")
    answers = completed("1,1,1", model_of("1,1,1", dtype, exact), page_size=8, max_seqs=3)
    bits = bits_of(answers)
    for mesh, engine in ENGINES + (EXPERT_ENGINES if exact.experts else []):
        assert bits_of(completed(mesh, model_of(mesh, dtype, exact), **engine)) == bits, (mesh, engine)
    for mesh in ("1,1,1", "1,4,1", "2,1,2"):
        assert trainer_bits(mesh, model_of(mesh, dtype, exact), answers) == bits, mesh


# float32 shows more than bfloat16, whose roundings hide what is before them.
@pytest.mark.parametrize(
    ("family", "dtype", "engines", "packings"),
    [
        pytest.param("gemma2", "float32", ENGINES[2:3], (("2,1,2", 3),), marks=pytest.mark.slow),
        pytest.param(
            "llama", "bfloat16", ENGINES[2:], (("1,4,1", 0), ("2,1,2", 3), ("1,1,1", 5)), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_model_with_adapters_and_packed_rows_have_the_same_bits(
    family: str, dtype: str, engines: list[tuple[str, dict[str, Any]]], packings: tuple[tuple[str, int], ...]
) -> None:
    """Those of the base alone are others. A document begins anywhere in its row."""
    config = dataclasses.replace(MODELS[family], numerics="exact", max_seq_len=256)

    def model(mesh: str) -> Any:
        return with_adapters(model_of(mesh, dtype, config))

    alone = model("1,1,1")
    answers = completed("1,1,1", alone, page_size=8, max_seqs=3)
    bits = bits_of(answers)
    for mesh, engine in engines:
        assert bits_of(completed(mesh, model(mesh), **engine)) == bits, (mesh, engine)
    for mesh, packed in packings:
        assert trainer_bits(mesh, model(mesh), answers, packed=packed) == bits, mesh
    assert bits_of(completed("1,1,1", alone.base, page_size=8, max_seqs=3)) != bits


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "lora", "dtype"),
    [("experts", MLPS, "bfloat16"), ("mixed", MLPS, "float32"), ("gpt_oss", GATE_UP, "bfloat16")],
)
def test_experts_with_adapters_have_the_same_bits(family: str, lora: LoraConfig, dtype: str) -> None:
    """Which the engine merges once, the trainer layer by layer."""
    config = dataclasses.replace(FAMILIES[family], numerics="exact")

    def model(mesh: str) -> Any:
        return with_adapters(model_of(mesh, dtype, config), lora)

    alone = model("1,1,1")
    answers = completed("1,1,1", alone, page_size=8, max_seqs=3)
    bits = bits_of(answers)
    for mesh, engine in (EXPERT_ENGINES[1], ENGINES[3]):
        assert bits_of(completed(mesh, model(mesh), **engine)) == bits, (mesh, engine)
    own = model("1,4,1")
    assert trainer_bits("1,4,1", in_bfloat16(own) if dtype == "bfloat16" else own, answers) == bits
    assert bits_of(completed("1,1,1", alone.base)) != bits


@pytest.mark.nightly
def test_a_router_with_an_adapter_has_the_same_bits() -> None:
    """Levanter gives it one."""
    config = dataclasses.replace(FAMILIES["experts"], numerics="exact")
    _, weights = read_decoder(model_of("1,1,1", "bfloat16", config))
    rng, whole = np.random.default_rng(0), jax.NamedSharding(mesh_of("1,1,1"), jax.P())
    a, b = (place(rng.standard_normal(shape).astype(np.float32), whole) for shape in ((2, 16, 3), (2, 3, 6)))
    pattern = "layer embed expert, layer embed rank, layer rank expert -> layer embed expert"
    router = merge_lora(weights.layers.router, a, b, pattern, scale=1.0)
    model = config, dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, router=router))
    answers = completed("1,1,1", model, page_size=8, max_seqs=3)
    assert audit(model, REQUESTS, answers).logprob_gap == 0.0
    assert bits_of(completed("1,1,1", (config, weights))) != bits_of(answers)


@st.composite
def exact_cases(draw: st.DrawFn) -> dict[str, Any]:
    """A model, prompts, two engines and a mesh of training that can compute it."""
    kv_heads, group = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    family, dtype = draw(st.sampled_from(sorted(ALL)))
    head_dim, latent = draw(st.sampled_from([4, 8, 12])), MODELS[family].latent is not None
    config = dataclasses.replace(
        MODELS[family],
        numerics="exact",
        num_kv_heads=kv_heads * group if latent else kv_heads,
        num_heads=kv_heads * group,
        head_dim=None if latent else head_dim,
        hidden_dim=draw(st.sampled_from([16, 24, 40])),
        intermediate_dim=draw(st.sampled_from([16, 24, 40])),
    )
    shapes = [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
    meshes = st.sampled_from([shape for shape in shapes if kv_heads % shape[2] == 0])

    def text(shape: tuple[int, ...]) -> str:
        return ",".join(map(str, shape))

    def engine() -> tuple[str, dict[str, Any]]:
        shape = draw(meshes)
        sizes = [size for size in (1, 2, 4, 8) if math.gcd(math.prod(shape), config.num_heads) % size == 0]
        layout = draw(st.sampled_from(["training", *({"tensor": size} for size in sizes)]))
        page, pages = draw(st.sampled_from([(1, 8), (4, 3), (16, 1), (16, 4), (128, 1)]))
        limits = {"page_size": page, "max_prefill_size": page * pages, "max_seqs": draw(st.integers(1, 6))}
        return text(shape), {"layout": layout, **limits}

    requests = [
        request(
            number,
            draw(st.integers(1, 50)),
            draw(st.integers(1, 12)),
            temperature=draw(st.sampled_from([0.0, 0.6, 1.0, 1.7])),
            seed=draw(st.integers(0, 9)),
            n_generations=draw(st.integers(1, 3)),
            prompt_logprobs=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    return {
        "config": config,
        "dtype": dtype,
        "requests": requests,
        "engines": [engine(), engine()],
        "mesh": text(draw(meshes)),
    }


@pytest.mark.nightly
@settings(max_examples=12, phases=[Phase.generate])
@given(case=exact_cases())
def test_many_models_batches_and_layouts_have_the_same_bits(case: dict[str, Any]) -> None:
    """Those of both engines and of the trainer."""
    config, dtype, requests = case["config"], case["dtype"], case["requests"]
    answers = [completed(mesh, model_of(mesh, dtype, config), requests, **engine) for mesh, engine in case["engines"]]
    bits = bits_of(answers[0])
    assert bits_of(answers[1]) == bits
    assert trainer_bits(case["mesh"], model_of(case["mesh"], dtype, config), answers[0], requests) == bits


@pytest.mark.nightly  # in make slow: drafts in test_decode.py
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


def test_a_type_without_a_test_is_refused() -> None:
    with pytest.raises(ConfigError, match="tested in bfloat16 and float32, not in float16. Use one of them"):
        Engine(EngineConfig(dtype="float16"), mesh_of("1,1,1")).check(model_of("1,1,1", "float32"), REQUESTS)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (dataclasses.replace(LLAMA, experts=Experts(scoring="sigmoid")), "experts.scoring is sigmoid"),
        (dataclasses.replace(LLAMA, variant=Variant(gated_norm_rank=2)), "variant.gated_norm_rank is 2"),
        (dataclasses.replace(LLAMA, variant=Variant(unit_qk_norm=1e-6)), "variant.unit_qk_norm is 1e-06"),
        (dataclasses.replace(LLAMA, variant=Variant(exclusive_attention=True)), "variant.exclusive_attention is True"),
        (dataclasses.replace(LLAMA, variant=Variant(head_gates=True)), "variant.head_gates is True"),
    ],
)
def test_what_is_not_exact_is_refused(config: LlamaConfig, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"numerics is exact and {setting}, which is not exact yet"):
        dataclasses.replace(config, numerics="exact")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_no_product_of_16_bits_is_one_of_float32(family: str) -> None:
    """XLA for CPU widens operands that are not in order in memory, and adds their products in another order."""
    programs, exact = {}, dataclasses.replace(FAMILIES[family], numerics="exact")
    for layout in (1, 4):
        engine = Engine(EngineConfig(layout={"tensor": layout}), mesh_of("1,2,2"))
        engine.generate(model_of("1,2,2", "bfloat16", exact), REQUESTS)
        programs |= {f"{name}, {layout}": program.text() for name, program in engine.programs.items()}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 24)), jnp.int32)
    training = jax.jit(lambda model: token_logprobs(model, {"tokens": tokens}))
    programs["training"] = training.lower(model_of("1,1,1", "bfloat16", exact)).compile().as_text()
    seen = 0
    for name, text in programs.items():
        for computation in text.split("\n\n"):
            types = dict(re.findall(r"%(\S+) = (\w+)\[", computation))
            for operands in re.findall(r" dot\(([^)]*)\)", computation):
                seen += 1
                assert {types[each.strip(" %")] for each in operands.split(",")} == {"bf16"}, name
    assert seen > 50


@pytest.mark.nightly  # in make slow: multiprocess/test_exact.py
def test_the_gradient_is_that_of_the_fast_forward_at_the_exact_numbers() -> None:
    """Which are known, so that a layer is computed once for its gradient, as rematerialisation does."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 12)), jnp.int32)

    def loss(model: Any) -> jax.Array:
        return jnp.sum(token_logprobs(model, {"tokens": tokens}))

    found, flops = {}, {}
    for numerics in ("fast", "exact"):
        config = dataclasses.replace(LLAMA, gradient_checkpointing=True, numerics=numerics)
        model = model_of("1,1,1", "float32", config)
        value, gradient = (jax.jit(each).lower(model).compile() for each in (loss, jax.grad(loss)))
        found[numerics] = jax.tree.leaves(gradient(model))
        flops[numerics] = [program.cost_analysis()["flops"] for program in (value, gradient)]
    for exact, fast in zip(found["exact"], found["fast"], strict=True):
        np.testing.assert_allclose(exact, fast, rtol=1e-4, atol=1e-5)  # two forwards that round in another order
    print(flops)
    assert flops["exact"][1] - flops["exact"][0] < flops["fast"][1] - 0.5 * flops["fast"][0]
