"""Tunix's models through our engine: tokens and log-probabilities of their own forward; what is refused."""

import jax
import numpy as np
import pytest
import qwix
from flax import nnx
from tunix.generate.mappings import BackendMappingMixin
from tunix.models.qwen3 import model as qwen3

from lockstep.engine import Engine, EngineConfig
from lockstep.models import LayerKind, RotaryConfig, UnreadableModelError, check_reader, layer_kinds, read_decoder
from lockstep.types import Request, SamplingParams
from tests import tunix_models as models

PROMPTS = [[int(token) for token in np.random.default_rng(3).integers(1, 64, size)] for size in (3, 9, 17)]
NIGHTLY = ("qwen3-tied", "llama3", "gemma", "gemma3-qkv")


def marks(name):
    return [] if name == "qwen3" else [pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow]


def answers(model, mesh, config=None):
    params = SamplingParams(max_new_tokens=12)
    requests = [
        Request(prompt_id=number, prompt_tokens=tuple(prompt), params=params) for number, prompt in enumerate(PROMPTS)
    ]
    return Engine(config or EngineConfig(), mesh).generate(model, requests)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in models.MODELS])
def test_answers_are_those_of_its_own_forward(name):
    mesh = models.mesh(2, 2)
    model = models.randomise(models.MODELS[name](), mesh)
    found = models.gap(model, PROMPTS, answers(model, mesh))
    assert found.logprob < 1e-5 and found.greedy < 1e-5, found


def test_reading_launches_nothing_and_copies_nothing():
    model = models.randomise(models.MODELS["qwen2"]())
    with jax.no_execution(True):
        _, weights = read_decoder(model)
    assert weights.embed is model.embedder.input_embedding.get_value()
    assert weights.layers.q.parts[0][1] is model.layers[1].attn.q_proj.w.get_value()


def test_rope_has_the_base_that_attention_uses_whatever_the_configuration_says():
    theta = {name: read_decoder(models.MODELS[name]())[0].rope.theta for name in ("llama3", "qwen3", "qwen2")}
    assert theta == {"llama3": 1e6, "qwen3": 1e6, "qwen2": 1e4}


def test_the_base_of_the_configuration_is_used_as_soon_as_attention_hands_it_on(monkeypatch):
    def block(self, x):
        return qwen3.apply_rope(x, x, head_dim=8, rope_theta=self.config.rope_theta)

    monkeypatch.setattr(qwen3.Attention, "block", block)
    assert read_decoder(models.MODELS["qwen3"]())[0].rope.theta == 500_000


def test_gemma_has_a_window_and_a_base_for_each_layer():
    config, _ = read_decoder(models.MODELS["gemma2"]())
    assert [kind.window for kind in layer_kinds(config)] == [6, None]
    config, _ = read_decoder(models.MODELS["gemma3"]())
    local = LayerKind(window=8, rope=RotaryConfig(theta=100.0))
    assert layer_kinds(config) == (local,) * 5 + (
        LayerKind(window=None, rope=RotaryConfig(theta=1000.0, linear_factor=4.0)),
    )
    assert config.variant.attention_scale is None
    assert read_decoder(models.MODELS["gemma3-qkv"]())[0].variant.attention_scale == 12**-0.5
    assert read_decoder(models.MODELS["gemma"]())[0].variant.layer_types is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("gemma2", marks=pytest.mark.nightly), "gemma3"])
def test_the_trainable_model_over_its_weights_computes_the_same(name):
    model = models.randomise(models.MODELS[name]())
    found = check_reader(model, lambda ids: models.logprobs(model, np.asarray(ids), 24), length=24)
    assert found.gap < 5e-5 and not found.unseen, found


def test_gemma_3_with_a_vision_tower_is_refused():
    model = models.gemma3_model()
    model.vision_encoder = nnx.data(nnx.Module())
    with pytest.raises(UnreadableModelError, match=r"Tunix's Gemma3 .*vision tower.*text_only=True.*docs/tunix.md"):
        read_decoder(model)


def adapted(
    model, mesh, *, rank=4, alpha=12.0, modules=".*(q_proj|v_proj|o_proj|gate_proj|down_proj|q_einsum|kv_einsum)"
):
    """The model with adapters of qwix that change what it says."""
    provider = qwix.LoraProvider(module_path=modules, rank=rank, alpha=alpha)
    with mesh:
        model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())
    rng = np.random.default_rng(5)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        value = variable.get_value()
        noise = (0.3 * rng.standard_normal(value.shape)).astype(value.dtype)
        nnx.update(model, nnx.from_flat_state({path: variable.replace(jax.device_put(noise, value.sharding))}))
    return model


@pytest.mark.parametrize(
    "name", [pytest.param("qwen3", marks=pytest.mark.nightly), pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_adapters_are_merged(name):
    mesh = models.mesh(2, 2)
    base = models.randomise(models.MODELS[name](), mesh)
    model = adapted(base, mesh)
    assert np.abs(models.logprobs(model, PROMPTS) - models.logprobs(base, PROMPTS)).max() > 0.1
    found = models.gap(model, PROMPTS, answers(model, mesh))
    assert found.logprob < 1e-5 and found.greedy < 1e-5, found


def test_experts_are_read_where_they_lie():
    model = models.randomise(models.MODELS["qwen3-moe"]())
    config, weights = read_decoder(model)
    assert (config.experts.num_experts, config.experts.num_experts_per_tok, config.expert_dim) == (6, 3, 22)
    assert config.experts.norm_topk_prob and weights.layers.gate is None
    assert weights.layers.expert_down.parts[0][1] is model.layers[1].mlp.down_proj.get_value()


def test_a_class_without_a_reader_is_refused_with_those_that_have_one():
    class Gemma5(BackendMappingMixin, nnx.Module):
        BACKEND_PACKAGE_PATH = __name__

    with pytest.raises(
        UnreadableModelError, match=r"Tunix's Gemma5 cannot be read.*Gemma, Gemma3, Llama3, Qwen2, Qwen3"
    ):
        read_decoder(Gemma5())


def test_a_parameter_that_nothing_reads_is_an_error_that_names_it():
    model = models.MODELS["llama3"]()
    model.layers[0].attn.q_bias = nnx.Param(np.zeros(32, np.float32))
    with pytest.raises(UnreadableModelError, match=r"read by no field.*layers.0.attn.q_bias"):
        read_decoder(model)
