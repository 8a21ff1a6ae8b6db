"""A Flax NNX model, read through a table of weight names; so are models of Tunix, MaxText and others with such names.

Needs ``flax`` (the extra ``levanter`` brings it). One process, or two simulated hosts::

    python examples/nnx_loop.py
    python infra/launch.py --backend local --processes 2 --devices_per_process 2 -- python examples/nnx_loop.py

What Lockstep needs of it is `NAMES` and `read` (docs/your-trainer.md).
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from transformers import AutoTokenizer

import lockstep
from lockstep.models import DecoderWeights, LlamaConfig, from_names, register_reader

DATA = Path(__file__).resolve().parents[1] / "data" / "demo"
LAYERS, EMBED, MLP, HEADS, HEAD, LENGTH = 2, 64, 192, 4, 16, 24

# The decoder's name, the model's, and how the axes of the model's array correspond to the decoder's.
NAMES = {
    "embed": "embed.embedding",
    "final_norm": "norm.scale",
    "lm_head": "head.kernel",
    "attn_norm": "layers.{}.norm1.scale",
    "mlp_norm": "layers.{}.norm2.scale",
    "q": "layers.{}.q.kernel",
    "k": ("layers.{}.kv.kernel", "two embed heads head -> embed heads head", {"two": 0}),
    "v": ("layers.{}.kv.kernel", "two embed heads head -> embed heads head", {"two": 1}),
    "o": "layers.{}.o.kernel",
    "gate": "layers.{}.gate.kernel",
    "up": "layers.{}.up.kernel",
    "down": "layers.{}.down.kernel",
}


class Block(nnx.Module):
    """A layer of the usual kind; keys and values come from one projection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(EMBED, epsilon=1e-5, rngs=rngs)
        self.norm2 = nnx.RMSNorm(EMBED, epsilon=1e-5, rngs=rngs)
        self.q = nnx.Einsum("bte,enf->btnf", (EMBED, HEADS, HEAD), rngs=rngs)
        self.kv = nnx.Einsum("bte,cenf->cbtnf", (2, EMBED, HEADS, HEAD), rngs=rngs)
        self.o = nnx.Linear(HEADS * HEAD, EMBED, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(EMBED, MLP, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[batch, position, embed]`` to the same."""
        positions = jnp.arange(x.shape[1])
        angles = positions[:, None] * 10000.0 ** (-jnp.arange(0, HEAD, 2) / HEAD)
        h = self.norm1(x)
        q, (k, v) = rotate(self.q(h), angles), self.kv(h)
        scores = jnp.einsum("btnf,bsnf->bnts", q, rotate(k, angles)) * HEAD**-0.5
        weights = jax.nn.softmax(jnp.where(positions[:, None] >= positions, scores, -jnp.inf))
        x = x + self.o(jnp.einsum("bnts,bsnf->btnf", weights, v).reshape(*x.shape[:2], -1))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class Model(nnx.Module):
    """A small Llama."""

    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, EMBED, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(EMBED, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(EMBED, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits ``[batch, position, vocab]``."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of ``[batch, position, head, head_size]``, the two halves of a head against each other."""
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@register_reader(Model)
def read(model: Model) -> tuple[LlamaConfig, DecoderWeights]:
    """The reader: every array by its name, by reference; one that is not in the table is an error."""
    config = LlamaConfig(
        max_seq_len=128,
        hidden_dim=EMBED,
        intermediate_dim=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
    )
    return config, from_names(NAMES)(model)


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
    graph = nnx.graphdef(nnx.eval_shape(lambda: Model(vocab, nnx.Rngs(0))))

    @jax.jit
    def make() -> tuple[Any, Any]:
        params = nnx.state(Model(vocab, nnx.Rngs(0)), nnx.Param)
        return shard((params, optimizer.init(params)), mesh)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens)[:, :-1]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def step_fn(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
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
        callback(SimpleNamespace(step=step, model=nnx.merge(graph, params)))
        float(loss)  # waits for the step
    callback.finish()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--output_dir", default="runs/nnx_loop", help="samples.jsonl is appended to here")
    options = parser.parse_args()
    train(options.steps, options.eval_every, options.output_dir)


if __name__ == "__main__":
    lockstep.run_main(main)
