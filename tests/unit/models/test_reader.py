"""Models are read as references to their own arrays; the readers of docs/your-trainer.md are short, and right."""

import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lockstep
from lockstep.errors import ConfigError, LockstepError
from lockstep.models import (
    DecoderWeights,
    Experts,
    LlamaConfig,
    LlamaLMHeadModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    UnreadableModelError,
    Variant,
    read_decoder,
    register_reader,
)
from lockstep.models.trainable import skeleton
from lockstep.placement import LazyWeight, mesh_of
from tests.multiprocess.launches import record_launches
from tests.tiny import requests

SIZES: dict[str, Any] = {
    "max_seq_len": 16,
    "hidden_dim": 12,
    "intermediate_dim": 20,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
}
# Sizes by the axis names in weights.py.
AXES = {"layer": 3, "embed": 12, "mlp": 20, "kv_head": 2, "group": 2, "head": 6, "vocab": 10}
AXES |= {"expert": 5, "expert_mlp": 8, "gate_up": 16, "shared_mlp": 9, "rank": 4, "one": 1}
# Axes of layers that none of these models has.
AXES |= dict.fromkeys(
    (
        "gated_head",
        "q_rank",
        "q_latent",
        "latent",
        "kv_latent",
        "key_value",
        "key_head",
        "qkvz",
        "gates",
        "key",
        "width",
        "value_group",
        "value",
    ),
    0,
)


def build(config: LlamaConfig) -> LlamaLMHeadModel:
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape), skeleton(10, config))


def declared_shapes(cls: type) -> dict[str, tuple[int, ...]]:
    """Shapes that the jaxtyping annotations in weights.py promise."""
    shapes = {}
    for field in dataclasses.fields(cls):
        kind = getattr(field.type, "__args__", [field.type])[0]
        if hasattr(kind, "dim_str"):
            shapes[field.name] = tuple(AXES[name] for name in kind.dim_str.split())
    return shapes


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES),
        Qwen3MoeConfig(**SIZES, experts=Experts(num_experts=5, intermediate_dim=8)),
        Qwen2MoeConfig(
            **SIZES, experts=Experts(num_experts=5, intermediate_dim=8, shared_intermediate_dim=9, shared_router=True)
        ),
        LlamaConfig(
            **SIZES,
            experts=Experts(num_experts=5, intermediate_dim=8, scoring="sigmoid"),
            variant=Variant(embed_norm=True, gated_norm_rank=4, head_gates=True),
        ),
    ],
    ids=["llama", "tied", "qwen2", "qwen3", "experts", "shared", "gates"],
)
def test_reading_gives_the_very_same_arrays_and_launches_nothing(config: LlamaConfig) -> None:
    model = build(config)
    with jax.no_execution(True):
        read_config, weights = read_decoder(model)
    assert read_config is config
    arrays = {id(leaf) for leaf in jax.tree.leaves(model)}
    leaves = jax.tree.leaves(weights)
    assert {id(leaf) for leaf in leaves} == arrays and len(leaves) == len(arrays)
    layer = model.layers.stacked
    assert weights.embed is model.embed.array
    assert weights.final_norm is model.final_norm.array
    assert weights.layers.q is layer.attention.q.array
    assert weights.layers.k is layer.attention.k.array
    assert weights.layers.v is layer.attention.v.array
    assert weights.layers.attn_norm is layer.attn_norm.array
    assert weights.layers.mlp_norm is layer.mlp_norm.array
    if config.experts is None:
        assert weights.layers.gate is layer.mlp.gate.array
        assert weights.layers.up is layer.mlp.up.array
    else:
        assert weights.layers.router is layer.mlp.router.array
        assert weights.layers.expert_down is layer.mlp.expert_down.array
    assert (weights.lm_head is None) == config.tie_word_embeddings
    assert (weights.layers.q_bias is not None) == config.qkv_bias
    assert (weights.layers.q_norm is not None) == config.qk_norm
    for part in (weights, weights.layers):
        for name, shape in declared_shapes(type(part)).items():
            array = getattr(part, name)
            assert array is None or array.shape == shape, name


def test_a_model_that_pmap_copied_and_a_part_of_one_are_refused_without_their_numbers() -> None:
    model = build(LlamaConfig(**SIZES))
    copies = jax.tree.map(lambda array: jnp.stack([array] * 3), model)
    for part, why in ((copies, r"is of shape \(3, .*one copy"), (eqx.filter(model, lambda _: False), "is missing")):
        with (
            jax.no_execution(True),
            pytest.raises(ConfigError, match=rf"the parameter \w+ has axes .* array {why}") as e,
        ):
            read_decoder(part)
        assert "[[" not in str(e.value)


def test_a_pair_is_read_as_it_is() -> None:
    config, weights = read_decoder(build(LlamaConfig(**SIZES)))
    again = read_decoder((config, weights))
    assert again[0] is config and again[1] is weights


def test_reading_works_inside_a_trace() -> None:
    def first_row(model: LlamaLMHeadModel) -> jax.Array:
        return read_decoder(model)[1].embed[0]

    model = build(LlamaConfig(**SIZES))
    np.testing.assert_array_equal(jax.jit(first_row)(model), model.embed.array[0])


def test_an_unknown_class_is_named_with_the_supported_ones() -> None:
    class TheirModel:
        pass

    with pytest.raises(UnreadableModelError, match=r"TheirModel cannot be read; supported are .*LlamaLMHeadModel") as e:
        read_decoder(TheirModel())
    assert isinstance(e.value, LockstepError)
    assert "register_reader" in str(e.value)


def test_a_tuple_of_something_else_is_named() -> None:
    with pytest.raises(
        UnreadableModelError, match=r"a tuple of \(builtins\.int, builtins\.str\) .*DecoderWeights\) can\. docs/"
    ):
        read_decoder((1, "a"))
    with pytest.raises(UnreadableModelError, match=r"Pass the model, flax\.nnx\.merge\(graphdef, state\), of a class"):
        read_decoder(nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))
    with pytest.raises(UnreadableModelError, match=r"Pass the lockstep\.models\.llama\.LlamaLMHeadModel alone"):
        read_decoder((object.__new__(LlamaLMHeadModel), "the state of an optimizer"))


def test_third_parties_can_register_a_reader() -> None:
    class Wrapper:
        def __init__(self, inner: LlamaLMHeadModel):
            self.inner = inner

    class Special(Wrapper):
        pass

    @register_reader(Wrapper)
    def read(model: Wrapper) -> tuple[LlamaConfig, DecoderWeights]:
        return read_decoder(model.inner)

    model = build(LlamaConfig(**SIZES))
    assert read_decoder(Special(model))[1].embed is model.embed.array


EXAMPLES = Path(__file__).parents[3] / "examples"


VOCAB = 64


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def greedy(forward, asked):
    """Greedy answers by the example's own forward pass."""
    answers = []
    for request in asked:
        tokens = list(request.prompt_tokens)
        while len(tokens) < len(request.prompt_tokens) + request.params.max_new_tokens:
            ids = np.zeros((1, 64), np.int32)
            ids[0, : len(tokens)] = tokens
            tokens.append(int(np.argmax(np.asarray(forward(ids))[0, len(tokens) - 1])))
            if tokens[-1] in request.params.stops:
                break
        answers.append(tuple(tokens[len(request.prompt_tokens) :]))
    return answers


def noisy(tree):
    """Every weight away from its neutral value."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.3 * rng.standard_normal(leaf.shape, np.float32)), tree)


def check(model, forward):
    asked = requests(lengths=(1, 17, 33))
    with record_launches() as launches:
        _, weights = read_decoder(model)
    assert launches == [] and any(isinstance(leaf, LazyWeight) for leaf in jax.tree.leaves(weights))
    got = lockstep.Engine(lockstep.EngineConfig(), mesh_of(weights.embed)).generate(model, asked)
    assert [answer.tokens for answer in got] == greedy(jax.jit(forward), asked)


@pytest.mark.slow
def test_a_dict_of_arrays():
    example = load("dict_loop")
    params = noisy(jax.jit(example.init, static_argnums=1)(jax.random.key(0), VOCAB))
    check(example.read(params), lambda ids: example.forward(params, ids))
    assert len(inspect.getsource(example.read).splitlines()) < 50


@pytest.mark.slow
def test_a_flax_model_by_its_weight_names():
    example = load("nnx_loop")
    nnx = example.nnx
    model = example.Model(VOCAB, nnx.Rngs(0))
    graph, params = nnx.split(model)
    params = noisy(params)
    check(nnx.merge(graph, params), lambda ids: nnx.merge(graph, params)(ids))
    assert len(inspect.getsource(example.read).splitlines()) + len(example.NAMES) < 50
