"""A plain JAX/optax loop over a dict of arrays, that shows what its model says while it learns.

One process, or two simulated hosts with the model sharded over all their devices::

    python examples/dict_loop.py
    python infra/launch.py --backend local --processes 2 --devices_per_process 2 -- python examples/dict_loop.py

Nothing here is Lockstep's but the callback and `read`, which tells it where the weights are (docs/your-trainer.md).
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from transformers import AutoTokenizer

import lockstep
from lockstep.models import DecoderWeights, LayerWeights, LlamaConfig, check_all_read, view

DATA = Path(__file__).resolve().parents[1] / "data" / "demo"
LAYERS, EMBED, MLP, HEADS, HEAD, LENGTH = 2, 64, 192, 4, 16, 24
Params = dict[str, Any]


def read(params: Params) -> tuple[LlamaConfig, DecoderWeights]:
    """Where the decoder finds each weight: by reference, nothing is copied or launched."""
    config = LlamaConfig(
        max_seq_len=128,
        hidden_dim=EMBED,
        intermediate_dim=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        tie_word_embeddings=True,
    )
    blocks = params["blocks"]
    weights = DecoderWeights(
        embed=params["embed"],
        final_norm=params["norm"],
        layers=LayerWeights(
            attn_norm=blocks["norm1"],
            mlp_norm=blocks["norm2"],
            q=view(blocks["wq"], "layer heads embed head -> layer embed heads head"),
            k=view(blocks["wk"], "layer heads embed head -> layer embed heads head"),
            v=view(blocks["wv"], "layer heads embed head -> layer embed heads head"),
            o=blocks["wo"],
            gate=blocks["w1"],
            up=blocks["w3"],
            down=blocks["w2"],
        ),
    )
    check_all_read(params, weights)  # an error that names a parameter that was forgotten above
    return config, weights


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Logits ``[batch, position, vocab]`` of a small Llama."""
    x = params["embed"][tokens]
    positions = jnp.arange(tokens.shape[1])
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    mask = positions[:, None] >= positions

    def block(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        h = rms_norm(x, w["norm1"])
        q, k, v = (jnp.einsum("bte,nef->btnf", h, w[name]) for name in ("wq", "wk", "wv"))
        scores = jnp.einsum("btnf,bsnf->bnts", rotate(q, angles), rotate(k, angles)) * HEAD**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        x = x + jnp.einsum("bnts,bsnf,nfe->bte", weights, v, w["wo"])
        h = rms_norm(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"], None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    return rms_norm(x, params["norm"]) @ params["embed"].T


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Root-mean-square normalisation."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of ``[batch, position, head, head_size]``, the two halves of a head against each other."""
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def init(key: jax.Array, vocab: int) -> Params:
    """Random weights."""
    shapes = {
        "wq": (HEADS, EMBED, HEAD),
        "wk": (HEADS, EMBED, HEAD),
        "wv": (HEADS, EMBED, HEAD),
        "wo": (HEADS, HEAD, EMBED),
        "w1": (EMBED, MLP),
        "w3": (EMBED, MLP),
        "w2": (MLP, EMBED),
    }
    keys = dict(zip([*shapes, "embed"], jax.random.split(key, len(shapes) + 1), strict=True))
    blocks = {name: 0.05 * jax.random.normal(keys[name], (LAYERS, *shape)) for name, shape in shapes.items()}
    blocks |= {"norm1": jnp.ones((LAYERS, EMBED)), "norm2": jnp.ones((LAYERS, EMBED))}
    return {"embed": 0.05 * jax.random.normal(keys["embed"], (vocab, EMBED)), "norm": jnp.ones(EMBED), "blocks": blocks}


def shard(tree: Any, mesh: Mesh) -> Any:
    """Fully sharded: each array split along its first axis of the embedding's size, inside a jitted function."""

    def constrain(leaf: jax.Array) -> jax.Array:
        split = leaf.shape.index(EMBED) if EMBED in leaf.shape else None
        spec = PartitionSpec(*("data" if axis == split else None for axis in range(leaf.ndim)))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(constrain, tree)


def train(steps: int, eval_every: int, output_dir: str) -> None:
    """Train, with the same calls on every host; the leader prints."""
    lockstep.start()  # before the first use of JAX
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizer")
    vocab = -(-len(tokenizer) // 8) * 8
    optimizer = optax.adamw(3e-3)

    def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(forward(params, tokens)[:, :-1], tokens[:, 1:])
        return jnp.mean(losses)

    @jax.jit
    def make() -> tuple[Params, Any]:
        params = init(jax.random.key(0), vocab)
        return shard((params, optimizer.init(params)), mesh)

    def step_fn(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return *shard((optax.apply_updates(params, updates), state), mesh), loss

    train_step = jax.jit(step_fn, donate_argnums=(0, 1))
    params, state = make()
    rows = np.random.default_rng(0).integers(0, len(tokenizer), (64, 8, LENGTH)).astype(np.int32)
    sharding = NamedSharding(mesh, PartitionSpec())

    config = lockstep.InferenceEvalConfig(
        prompts=["What is 8 in words?", "one"],
        prompt_format="text",  # without the tokenizer's chat template
        eval_every=eval_every,
        audit=True,
    )
    callback = lockstep.SampleCallback(config, tokenizer, output_dir=output_dir)
    for step in range(1, steps + 1):
        batch = rows[step % len(rows)]
        tokens = jax.make_array_from_callback(batch.shape, sharding, lambda index, batch=batch: batch[index])
        params, state, loss = train_step(params, state, tokens)
        callback(SimpleNamespace(step=step, model=read(params)))
        float(loss)  # waits for the step
    callback.finish()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--output_dir", default="runs/dict_loop", help="samples.jsonl is appended to here")
    options = parser.parse_args()
    train(options.steps, options.eval_every, options.output_dir)


if __name__ == "__main__":
    lockstep.run_main(main)
