"""Every Levanter family: greedy tokens equal those of Levanter's own dense forward, on one process as the oracle."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from levanter.adaptor.lora import LoraConfig, loraize
from levanter.dpo import DpoModel
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig, YarnRotaryEmbeddingsConfig
from levanter.models.apertus import ApertusConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config, QwenConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig

import lockstep
from lockstep.models import UnreadableModelError, read_decoder
from lockstep.placement import mesh_of
from tests import levanter_models as models
from tests.multiprocess.launches import record_launches
from tests.oracle import assert_same_logprobs, assert_same_tokens
from tests.tiny import requests

LLAMA3 = Llama3RotaryEmbeddingsConfig(original_max_position_embeddings=16)
FAMILIES: dict[str, Any] = {
    "llama": models.LLAMA,
    "llama3": LlamaConfig(**models.SIZES, rope=LLAMA3, tie_word_embeddings=True),
    "llama_hybrid": LlamaConfig(**models.SIZES, hybrid_norm=True, input_embedding_norm=True, use_qk_norm=True),
    "mistral": MistralConfig(**models.SIZES),
    "qwen2": QwenConfig(**models.SIZES),
    "qwen3": Qwen3Config(**models.SIZES, head_dim=16),
    "olmo2": Olmo2Config(**models.SIZES),
    "gemma": GemmaConfig(**models.SIZES),
    "gemma2": Gemma2Config(**models.SIZES, attn_logit_softcapping=2.0),
    "gemma3": Gemma3Config(**models.SIZES),
    "apertus": ApertusConfig(**models.SIZES, rope=LLAMA3),
    "mixtral": MixtralConfig(**models.SIZES, n_routed_experts=5),
    "mixtral_shared": MixtralConfig(**models.SIZES, n_routed_experts=4, n_shared_experts=2),
    "qwen3_moe": Qwen3MoeConfig(
        **models.SIZES, head_dim=16, num_experts=5, num_experts_per_tok=3, moe_intermediate_dim=24, norm_topk_prob=False
    ),
}
NIGHTLY = (
    "mixtral",
    "mixtral_shared",
    "llama",
    "llama_hybrid",
    "mistral",
    "gemma",
    "gemma2",
    "olmo2",
    "qwen2",
    "qwen3",
    "apertus",
)
"""Families that are read as those of the other tests are."""
UNSTACKED = {
    name: dataclasses.replace(FAMILIES[name], scan_layers=False) for name in ("llama", "olmo2", "gemma2", "apertus")
}


def sharded(model: Any) -> Any:
    """The model as Levanter shards it over 2 × 2 devices, with FSDP and tensor parallelism."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        return hax.shard(model, {"embed": "data", "mlp": "model", "heads": "model"})


def check(model: Any, oracle: Any = None) -> None:
    """Reads without a launch, generates, compares tokens and log-probabilities, audits."""
    asked = requests()
    with record_launches() as launches:
        _, weights = read_decoder(model)
    assert launches == []
    got = lockstep.Engine(lockstep.EngineConfig(), mesh_of(weights.embed)).generate(model, asked)
    expected = models.dense_completions(model if oracle is None else oracle, asked)
    assert len({answer.tokens for answer in expected}) > 3
    assert assert_same_tokens(expected, got) == 0
    assert_same_logprobs(expected, got, atol=3e-5)
    assert lockstep.audit(model, asked, got).logprob_gap < 3e-5


def some_nightly(names: Any, nightly: Sequence[str]) -> list[Any]:
    """Each name, and most of them for the nightly tests: a family takes 5 seconds."""
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in nightly)) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", some_nightly(FAMILIES, nightly=NIGHTLY))
def test_a_family_says_what_levanter_says(name):
    check(models.build(FAMILIES[name]))


@pytest.mark.nightly  # in make slow: the families above
@pytest.mark.parametrize("name", UNSTACKED)
def test_layers_need_not_be_stacked(name):
    check(models.build(UNSTACKED[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some_nightly(["sharded", "stacked", "by layer", "router"], nightly=["stacked", "by layer"])
)
def test_lora_is_merged_on_the_way(name):
    lora = LoraConfig(r=4, alpha=8.0, a_init_mode="random")
    config = {"by layer": UNSTACKED["olmo2"], "router": FAMILIES["qwen3_moe"]}.get(name, models.LLAMA)
    # The adapters add to what the weights give: with smaller weights, logits are as large as in the other tests.
    model = loraize(models.build(config, scale=0.5), lora, key=jax.random.key(5))
    check(sharded(model) if name == "sharded" else model, model)


@pytest.mark.slow
def test_the_policy_of_a_dpo_model_is_read():
    policy, reference = models.build(models.LLAMA), models.build(models.LLAMA, seed=7)
    config, weights = read_decoder(policy)
    own, pair = read_decoder(DpoModel(policy=policy, reference=reference))
    assert own == config
    for ours, theirs in zip(jax.tree.leaves(pair), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Gpt2Config(num_layers=1, hidden_dim=32, num_heads=2), "Gpt2LMHeadModel cannot be read; supported are Apertus"),
        (dataclasses.replace(models.LLAMA, rope=YarnRotaryEmbeddingsConfig()), "LlamaLMHeadModel cannot be read: rope"),
        (dataclasses.replace(models.LLAMA, use_bias=True), "a RmsNorm has a bias"),
        (dataclasses.replace(models.LLAMA, activation_function="quick_gelu"), "activation_function is quick_gelu"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config, text):
    model = jax.eval_shape(lambda: config.build(hax.Axis("vocab", 64), key=jax.random.key(0)))
    with pytest.raises(UnreadableModelError, match=text):
        read_decoder(model)
