"""A model with adapters: what it computes, learns, and is sampled from."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import LoraConfig, LoraModel, join_trained, read_decoder, split_trained
from lockstep.models.lora import _program, adapter_products, merge_adapters, weight_of
from lockstep.placement import COMPUTE_AXES, sources, weight_specs
from tests.adapters import GATE_UP, LORA, MLPS, merged, mesh_of_model, numpy_merged, with_adapters
from tests.multiprocess.launches import record_launches
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import FAMILIES, LLAMA, VOCAB, model_on, request

IDS = np.random.default_rng(0).integers(0, VOCAB, (4, 9)).astype(np.int32)


def logits(model):
    """The logits of ``IDS``, on the mesh of the model."""
    with jax.set_mesh(mesh_of_model(model)):
        return compute(model, IDS)


@jax.jit
def compute(model, ids):
    with hax.axis_mapping(COMPUTE_AXES):
        return model(hax.named(ids, ("batch", "position"))).array


SEVEN = [f"{weight}_proj" for weight in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.mark.parametrize(
    ("family", "mesh_shape", "lora"),
    [
        pytest.param("qwen3", "1,1,1", LORA, marks=pytest.mark.slow),
        ("llama", "1,2,2", LORA),
        pytest.param("experts", "1,2,2", MLPS, marks=pytest.mark.nightly),
    ],
)
def test_it_computes_as_the_merged_model(family, mesh_shape, lora):
    model = with_adapters(model_on(mesh_shape, FAMILIES[family]), lora)
    expected, base = logits(merged(model)), logits(model.base)
    np.testing.assert_allclose(logits(model), expected, rtol=2e-4, atol=2e-4)
    assert np.abs(expected - base).max() > 1, "the adapters matter"


@pytest.mark.slow
def test_new_adapters_change_nothing_to_the_bit():
    base = model_on("1,1,1")
    pairs = LORA.init(base.config, jax.random.key(0))
    assert list(pairs) == SEVEN
    for name, pair in pairs.items():
        inputs = np.prod(pair.a.array.shape[1:-1])
        assert not pair.b.array.any() and 0.8 < np.abs(pair.a.array).max() * inputs**0.5 <= 1, name
    np.testing.assert_array_equal(logits(LoraModel(base=base, adapters=pairs, scale=2.0)), logits(base))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh_shape", "lora"),
    [
        pytest.param("llama", "1,1,1", LORA, marks=pytest.mark.nightly),
        pytest.param("experts", "1,1,1", MLPS, marks=pytest.mark.nightly),
        ("experts", "1,2,2", MLPS),
        pytest.param("gpt_oss", "1,2,2", GATE_UP, marks=pytest.mark.nightly),
        pytest.param("mixed", "1,2,1", MLPS, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_those_of_the_merged_weights(family, mesh_shape, lora):
    model = with_adapters(model_on(mesh_shape, FAMILIES[family]), lora)
    trained, frozen = split_trained(model)

    def loss(m):
        return jnp.mean(jnp.square(compute(m, IDS)))

    def oracle(factors):
        weights = {}
        for name, (a, b) in factors.items():
            weight = model.weight(name).array
            stack = weight.shape[: 2 if name.startswith("expert_") else 1]
            delta = a.reshape(*stack, -1, lora.r) @ b.reshape(*stack, lora.r, -1)
            weights[name] = weight + model.scale * delta.reshape(weight.shape)
        return loss(model.with_weights(weights))

    with jax.set_mesh(mesh_of_model(model)):
        got = jax.jit(jax.grad(lambda part: loss(join_trained(part, frozen))))(trained)
        expected = jax.jit(jax.grad(oracle))({name: (pair.a.array, pair.b.array) for name, pair in trained.items()})
    assert got.keys() == expected.keys() == set(lora.modules_of(model.config))
    for name, (a, b) in expected.items():
        for mine, theirs in ((got[name].a.array, a), (got[name].b.array, b)):
            assert np.abs(theirs).max() > 1e-3
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * float(np.abs(theirs).max()), err_msg=name)


def test_what_is_trained_and_what_is_frozen_are_put_together_again():
    model = with_adapters(model_on("1,1,1"))
    trained, frozen = split_trained(model)
    assert trained is model.adapters and frozen.base is model.base and frozen.adapters is None
    again = join_trained(trained, frozen)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert split_trained(model.base) == (model.base, None) and join_trained(model.base, None) is model.base


@pytest.mark.parametrize("mesh_shape", ["1,2,2"])
def test_the_decoder_merges_on_the_way(mesh_shape):
    lora = LoraConfig(r=3, alpha=6.0, target_modules=("q_proj", "o_proj", "down_proj"))
    model = with_adapters(model_on(mesh_shape), lora)
    with record_launches() as launches:
        _, weights = read_decoder(model)
    assert launches == []
    assert weights.embed is model.base.embed.array and weights.layers.k is model.weight("k_proj").array
    made = jax.tree.map(lambda spec, parts: spec.make(parts), weight_specs(weights), sources(weights))
    for name, expected in numpy_merged(model).items():
        own = getattr(made.layers, weight_of(name))
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora", "layout"),
    [
        pytest.param("llama", LORA, {"tensor": 2}, marks=pytest.mark.nightly),
        pytest.param("llama", LORA, "training", marks=pytest.mark.nightly),
        ("experts", MLPS, {"expert": 2}),
        ("mixed", MLPS, {"tensor": 2}),
    ],
)
def test_samples_are_those_of_the_merged_model(family, lora, layout):
    model = with_adapters(model_on("1,2,2", FAMILIES[family]), lora)
    asked = [request(i, length, new=6) for i, length in enumerate((3, 9, 14))]
    engine = lockstep.Engine(lockstep.EngineConfig(layout=layout), mesh_of_model(model))
    got = engine.generate(model, asked)
    expected = oracle_completions(merged(model), asked)
    assert assert_same_tokens(expected, got) == 0
    assert_same_logprobs(expected, got, atol=3e-5)
    programs = len(engine.compilations)
    other = with_adapters(model.base, lora, seed=8)
    assert engine.generate(other, asked) != got, "the adapters of now"
    assert len(engine.compilations) == programs


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"r": 0}, "lora.r is 0; a rank must be at least 1. Raise it, or leave lora out."),
        ({"alpha": 0.0}, r"lora.alpha is 0.0; it must be a number above 0"),
        ({"alpha": float("nan")}, r"lora.alpha is nan"),
        ({"target_modules": ()}, r"lora.target_modules is \[\]; it must be all-linear alone, or one or more of q_"),
        ({"target_modules": ("q_proj", "query")}, r"lora.target_modules has 'query'; it must be all-linear alone"),
        ({"target_modules": ("all-linear", "q_proj")}, r"lora.target_modules has 'all-linear'"),
        ({"target_modules": ("q_proj", "q_proj")}, r"is \['q_proj', 'q_proj'\]; .* each once"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_fix(values, text):
    with pytest.raises(ConfigError, match=text):
        LoraConfig(**values)


def test_a_rank_that_a_layer_cannot_have_is_refused():
    with pytest.raises(ConfigError, match=r"lora.r is 17, and q_proj maps 16 numbers to 32: no more than 16 can have"):
        LoraConfig(r=17).shapes(LLAMA)
    LoraConfig(r=16).shapes(LLAMA)
    with pytest.raises(ConfigError, match="lora.target_modules has gate_proj, which this model does not have"):
        MLPS.shapes(FAMILIES["apertus"])
    with pytest.raises(
        ConfigError, match=r"has gate_proj, which .* some of q_proj, .*, o_proj, down_proj, gate_up_proj"
    ):
        MLPS.shapes(FAMILIES["gpt_oss"])
    with pytest.raises(ConfigError, match=r"expert_up_proj maps 16 numbers to 12: .* or leave up_proj out of"):
        LoraConfig(r=13, target_modules=("up_proj",)).shapes(FAMILIES["experts"])


def test_modules_are_in_the_order_of_the_model():
    assert list(LoraConfig().modules_of(LLAMA)) == SEVEN
    assert LoraConfig(target_modules=("down_proj", "q_proj")).modules_of(LLAMA) == ("q_proj", "down_proj")


TWO = LoraConfig(r=3, alpha=6.0, target_modules=("k_proj", "down_proj"))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_with_adapters_are_merged_and_others_are_the_very_same(dtype):
    hosts = Hosts(MemoryClient.hub(1)[0])
    model = with_adapters(model_on("1,2,2"), TWO)
    before = _program.cache_info().misses
    found = merge_adapters(model, hosts, dtype)
    assert _program.cache_info().misses == before + 2
    layer, old = found.layers.stacked, model.base.layers.stacked
    for name, own in (("k_proj", layer.attention.k), ("down_proj", layer.mlp.down)):
        assert own.array.dtype == (dtype or "float32") and own.axes == model.weight(name).axes
        assert own.array.sharding.is_equivalent_to(model.weight(name).array.sharding, own.array.ndim)
        expected = numpy_merged(model)[name].astype(np.float32).astype(own.array.dtype)
        tolerance = 1e-5 if dtype is None else 2**-7
        np.testing.assert_allclose(
            np.asarray(own.array, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
        )
    assert layer.attention.q.array is old.attention.q.array and found.embed.array is model.base.embed.array
    assert jax.tree.structure(found) == jax.tree.structure(model.base)
    merge_adapters(with_adapters(model.base, TWO, seed=1), hosts, dtype)
    assert _program.cache_info().misses == before + 2, "compiled once"


def test_experts_have_adapters_where_they_are_asked_for() -> None:
    mixed, gpt_oss = FAMILIES["mixed"], FAMILIES["gpt_oss"]
    assert (
        LoraConfig().modules_of(mixed) == LoraConfig().modules_of(gpt_oss) == ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    assert GATE_UP.modules_of(gpt_oss) == ("expert_gate_up_proj", "expert_down_proj")
    pairs = LoraConfig(r=2, target_modules=("v_proj", "down_proj")).shapes(mixed)
    assert {name: (pair.a.array.shape, pair.b.array.shape) for name, pair in pairs.items()} == {
        "v_proj": ((4, 16, 2), (4, 2, 2, 8)),
        "down_proj": ((2, 24, 2), (2, 2, 16)),  # of the layers that have an MLP
        "expert_down_proj": ((2, 3, 20, 2), (2, 3, 2, 16)),
        "shared_down_proj": ((2, 28, 2), (2, 2, 16)),
    }
    # A token has 2 of 3 experts.
    sizes = {"v_proj": 4 * 2 * 32, "down_proj": 2 * 2 * 40, "expert_down_proj": 2 * 2 * 2 * 36, "shared": 2 * 2 * 44}
    assert adapter_products(pairs, mixed) == sum(sizes.values())
