"""Qwen3 of JAX Bonsai, plain Flax NNX, read by the names of its parameters, checked, and sampled.

Bonsai is installed from its repository, without what it pins: ``pip install --no-deps git+https://github.com/jax-ml/bonsai``.
Written for its commit 3628425 (March 2026); our tests do not run it::

    python examples/bonsai_qwen3.py

A random model of a few layers is made, so the answers mean nothing. In a trainer, pass the model to a
`lockstep.SampleCallback` as examples/nnx_loop.py does.
"""

from functools import partial

import jax
import jax.numpy as jnp
from bonsai.models.qwen3.modeling import ModelConfig, Qwen3, init_cache
from flax import nnx

import lockstep
from lockstep.models import DecoderWeights, Qwen3Config, RotaryConfig, check_reader, from_names, register_reader
from lockstep.placement import mesh_of

# The decoder's name and the model's; all axes are in the decoder's order.
NAMES = {
    "embed": "embedder.embedding",
    "final_norm": "final_norm.scale",
    "lm_head": "lm_head.kernel",  # an array of its own even where the checkpoint ties it to the embedding
    "attn_norm": "layers.{}.input_layernorm.scale",
    "mlp_norm": "layers.{}.post_attention_layernorm.scale",
    "q": "layers.{}.attn.q_proj.kernel",
    "k": "layers.{}.attn.k_proj.kernel",
    "v": "layers.{}.attn.v_proj.kernel",
    "o": "layers.{}.attn.o_proj.kernel",
    "q_norm": "layers.{}.attn.q_norm.scale",
    "k_norm": "layers.{}.attn.k_norm.scale",
    "gate": "layers.{}.mlp.gate_proj.kernel",
    "up": "layers.{}.mlp.up_proj.kernel",
    "down": "layers.{}.mlp.down_proj.kernel",
}
ROPE_BASE = 1_000_000.0
"""Its attention does not pass ``config.rope_theta`` on; `check_reader` tells who follows the configuration."""


@register_reader(Qwen3)
def read(model: Qwen3) -> tuple[Qwen3Config, DecoderWeights]:
    """The reader: sizes from the configuration, every array by its name."""
    theirs = model.config
    config = Qwen3Config(
        max_seq_len=4096,
        hidden_dim=theirs.emb_dim,
        intermediate_dim=theirs.mlp_dim,
        num_layers=theirs.num_layers,
        num_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        layer_norm_epsilon=theirs.norm_eps,
        rope=RotaryConfig(theta=ROPE_BASE),
    )
    return config, from_names(NAMES)(model)


@jax.jit
def forward(model: Qwen3, ids: jax.Array) -> jax.Array:
    """Its own logits ``[batch, position, vocab]``, for `check_reader`."""
    cache = init_cache(model.config, *ids.shape, 0, jnp.float32)
    return model(ids, cache=cache, segment_ids=jnp.ones_like(ids))


def small_model(seed: int = 0) -> Qwen3:
    """A random model whose every weight, norms too, is away from its neutral value: only then a check sees all."""
    config = ModelConfig(
        num_layers=2,
        vocab_size=64,
        emb_dim=32,
        mlp_dim=48,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        rope_scaling_factor=8.0,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    graph, state = nnx.split(Qwen3(config, rngs=nnx.Rngs(seed)))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, moved))


def main() -> None:
    """Check the reader, then answer two prompts of token ids."""
    lockstep.start()
    model = small_model()
    print(check_reader(model, partial(forward, model)))
    params = lockstep.SamplingParams(max_new_tokens=8)
    requests = [lockstep.Request(prompt_id=i, prompt_tokens=(1, 2, 3 + i), params=params) for i in range(2)]
    engine = lockstep.Engine(lockstep.EngineConfig(), mesh_of(read(model)[1].embed))
    for answer in engine.generate(model, requests):
        print(answer.prompt_id, answer.tokens)


if __name__ == "__main__":
    lockstep.run_main(main)
