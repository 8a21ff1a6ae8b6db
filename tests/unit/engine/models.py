"""Tiny models of every family, sharded as the trainer shards them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Observer
from lockstep.models import (
    Experts,
    LlamaConfig,
    LlamaLMHeadModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Variant,
)
from lockstep.models.families.cohere2 import Cohere2Config, Cohere2Variant
from lockstep.models.families.deepseek_v3 import DeepseekV3Config
from lockstep.models.families.gpt_oss import GptOssConfig, GptOssVariant
from lockstep.models.latent import Latent
from lockstep.models.rope import Llama3Scaling, RotaryConfig, YarnScaling
from lockstep.models.trainable import skeleton
from lockstep.placement import make_mesh, parameter_axes, place
from lockstep.types import Request, SamplingParams


class Between(Observer):
    """Calls a function with the scheduler before each launch."""

    def __init__(self, between_launches: Callable[[Any], object]) -> None:
        self.between_launches = between_launches  # type: ignore[assignment]  # a method that is a function here


SIZES: dict[str, Any] = {
    "max_seq_len": 64,
    "hidden_dim": 16,
    "intermediate_dim": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "gradient_checkpointing": False,
}
LLAMA = LlamaConfig(**SIZES)
FAMILIES = {
    "llama": LLAMA,
    "llama3": LlamaConfig(
        **SIZES, rope=RotaryConfig(theta=100.0, scaling=Llama3Scaling(original_max_position_embeddings=16))
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma": LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        qk_norm=True,
        variant=Variant(
            activation="gelu_tanh",
            post_norm=True,
            norm_plus_one=True,
            embed_scale=4.0,
            attention_scale=0.3,
            attention_soft_cap=2.0,
            logit_soft_cap=3.0,
        ),
    ),
    "olmo": LlamaConfig(
        **SIZES,
        qk_norm=True,
        rope=RotaryConfig(theta=100.0, yarn=YarnScaling(factor=4.0, original_max_position_embeddings=16)),
        variant=Variant(
            pre_norm=False,
            post_norm=True,
            wide_qk_norm=True,
            sliding_window=6,
            full_attention_every=2,
            sliding_rope=RotaryConfig(theta=100.0),
        ),
    ),
    "gemma3": LlamaConfig(
        **SIZES | {"num_layers": 3},
        tie_word_embeddings=False,
        qk_norm=True,
        rope=RotaryConfig(theta=1000.0, linear_factor=4.0),
        variant=Variant(
            activation="gelu_tanh",
            post_norm=True,
            norm_plus_one=True,
            embed_scale=4.0,
            attention_scale=0.3,
            logit_soft_cap=3.0,
            sliding_window=6,
            layer_types=("sliding_attention", "full_attention", "sliding_attention"),
            sliding_rope=RotaryConfig(theta=100.0),
        ),
    ),
    "experts": Qwen3MoeConfig(
        **SIZES, experts=Experts(num_experts=6, num_experts_per_tok=3, intermediate_dim=12, norm_topk_prob=False)
    ),
    "sinks": LlamaConfig(
        **SIZES,
        qkv_bias=True,
        rope=RotaryConfig(theta=100.0, yarn=YarnScaling(factor=4.0, original_max_position_embeddings=16)),
        variant=Variant(attention_sinks=True, o_bias=True, sliding_window=6, full_attention_every=2),
    ),
    "gpt_oss": GptOssConfig(
        **SIZES,
        rope=RotaryConfig(theta=100.0),
        experts=Experts(num_experts=4, num_experts_per_tok=2),
        variant=GptOssVariant(sliding_window=6),
    ),
    "mixed": Qwen2MoeConfig(
        **SIZES | {"num_layers": 4},
        experts=Experts(
            num_experts=3,
            num_experts_per_tok=2,
            intermediate_dim=20,
            shared_intermediate_dim=28,
            shared_router=True,
            mlp_only_layers=(0, 2),
        ),
    ),
    "apertus": LlamaConfig(**SIZES, qk_norm=True, variant=Variant(activation="xielu", embed_norm=True)),
    "cohere": Cohere2Config(
        **SIZES | {"num_layers": 3},
        rope=RotaryConfig(theta=100.0),
        variant=Cohere2Variant(sliding_window=6, full_attention_every=2, logit_scale=0.7),
    ),
    "latent": DeepseekV3Config(
        **SIZES | {"num_layers": 3, "num_kv_heads": 4, "head_dim": None},
        rope=RotaryConfig(theta=100.0, yarn=YarnScaling(factor=4.0, original_max_position_embeddings=16)),
        latent=Latent(kv_lora_rank=12, q_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=9),
        experts=Experts(
            num_experts=6,
            num_experts_per_tok=3,
            intermediate_dim=12,
            shared_intermediate_dim=12,
            mlp_only_layers=(0,),
            scoring="biased_sigmoid",
            groups=3,
            groups_per_tok=2,
        ),
    ),
}
EXACT = list(FAMILIES)
"""The families that have ``numerics: exact``."""
VOCAB = 40


@functools.cache
def model_on(mesh_shape: str, config: LlamaConfig = LLAMA, vocab: int = VOCAB) -> LlamaLMHeadModel:
    """A model with random weights, the same on every mesh; nothing is compiled."""
    mesh = mesh_of(mesh_shape)
    rng, axes = np.random.default_rng(1), parameter_axes(mesh)

    def draw(leaf: hax.NamedArray) -> hax.NamedArray:
        values = 0.5 * rng.standard_normal([axis.size for axis in leaf.axes]).astype(np.float32)
        spec = jax.sharding.PartitionSpec(*(axes.get(axis.name) for axis in leaf.axes))
        return dataclasses.replace(leaf, array=place(values, jax.sharding.NamedSharding(mesh, spec)))

    return jax.tree.map(draw, skeleton(vocab, config), is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))


@functools.cache
def mesh_of(shape: str) -> jax.sharding.Mesh:
    """A mesh of the first devices."""
    size = math.prod(int(axis.rpartition("=")[2]) for axis in shape.split(","))
    if size > len(jax.devices()):
        pytest.skip(f"mesh {shape} needs {size} devices, and there are {len(jax.devices())}", allow_module_level=True)
    return make_mesh(shape, jax.devices()[:size])


def request(number: int, prompt: int | tuple[int, ...], new: int = 8, **params: Any) -> Request:
    """A request; a prompt given by its length is random, with the beginning it has in every other."""
    if isinstance(prompt, int):
        prompt = tuple(np.random.default_rng(5).integers(0, 30, 64)[: prompt - 1].tolist()) + (number % 30,)
    return Request(prompt_id=number, prompt_tokens=prompt, params=SamplingParams(max_new_tokens=new, **params))


def mixed_requests() -> list[Request]:
    """Greedy and sampled; alone and in groups; short, of whole pages, and long; with common beginnings and stops."""
    return [
        request(0, 1, 12),
        request(1, 33, 12, n_generations=2),
        request(2, 22, 12, temperature=0.8, seed=3, n_generations=3),
        request(3, 33, 6, temperature=0.8, seed=2**32 - 1),
        request(2**32 - 1, 9, 12, temperature=0.8, stop_token_ids=tuple(range(1, 18, 2))),
        request(5, 24, 12, stop_token_ids=tuple(range(0, 39, 3))),
        request(6, 40, 1, temperature=1.5),
    ]


def many_requests() -> list[Request]:
    """Enough tokens to count near-ties in, greedy and sampled."""
    greedy = [request(number, 1 + 7 * number % 40, 12) for number in range(12)]
    return greedy + [
        request(number, 1 + 7 * number % 40, 12, temperature=0.8, seed=number, n_generations=3)
        for number in range(12, 24)
    ]


def in_bfloat16(model: Any) -> Any:
    """The model with parameters in bfloat16, placed as they were."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf.astype(jnp.bfloat16), leaf.sharding), model)
