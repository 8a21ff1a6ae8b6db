"""A training loop of your own, in plain JAX and optax, that shows what its model says.

One process (a minute on a laptop), or two simulated hosts with the model sharded over all their devices::

    python examples/own_loop.py
    python infra/launch.py --backend local --processes 2 --devices_per_process 2 -- python examples/own_loop.py

The model learns to write numbers in words; the questions it is asked meanwhile are not in its training data. Only the
model class is Lockstep's; mesh, data, loss, optimizer and loop are what you would write yourself.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from transformers import AutoTokenizer

import lockstep
from lockstep.hosts import run_main
from lockstep.models import LlamaConfig, LlamaLMHeadModel

DATA = Path(__file__).resolve().parents[1] / "data" / "demo"
BATCH, LENGTH = 64, 20
PROMPTS = [
    {"prompt": "What is 8281 in words?", "answer": "eight thousand two hundred eighty-one"},
    {"prompt": "What is 6430 in words?", "answer": "six thousand four hundred thirty"},
    {"prompt": "What is 120 in words?", "answer": "one hundred twenty"},
]


def train(steps: int, eval_every: int, output_dir: str) -> None:
    """Train, with the same calls on every host; the leader prints."""
    hosts = lockstep.start()  # before the first use of JAX; alone, this process is the only host
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizer")
    batches = read_batches(tokenizer, mesh)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps, 0.1), weight_decay=0.1)
    model, opt_state = init(optimizer, len(tokenizer), mesh)

    def loss_fn(model: LlamaLMHeadModel, batch: dict[str, jax.Array]) -> jax.Array:
        model = jax.lax.with_sharding_constraint(model, NamedSharding(mesh, PartitionSpec()))  # whole while in use
        logits = model(hax.named(batch["tokens"], ("batch", "position"))).array[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return jnp.sum(losses * batch["mask"][:, 1:]) / jnp.sum(batch["mask"][:, 1:])

    def step_fn(model: Any, opt_state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, model)
        return *shard((optax.apply_updates(model, updates), opt_state), mesh), loss

    train_step = jax.jit(step_fn, donate_argnums=(0, 1))

    config = lockstep.InferenceEvalConfig(
        prompts=PROMPTS,
        prompt_format="text",  # as the model is trained, without the tokenizer's chat template
        eval_every=eval_every,
        metrics=["exact_match"],
    )
    callback = lockstep.SampleCallback(config, tokenizer, output_dir=output_dir)
    for step in range(1, steps + 1):
        model, opt_state, loss = train_step(model, opt_state, next(batches))
        callback(SimpleNamespace(step=step, model=model))
        shown = float(loss)  # waits for the step: on CPUs, collectives of many steps in flight starve each other
        if hosts.is_leader and step % 20 == 0:
            print(f"step {step}/{steps}  loss {shown:.4f}", flush=True)
    callback.finish()


def init(optimizer: optax.GradientTransformation, vocab_size: int, mesh: Mesh) -> tuple[LlamaLMHeadModel, Any]:
    """A small Llama and the optimizer's state, each device making its own part."""
    config = LlamaConfig(
        max_seq_len=128, hidden_dim=128, intermediate_dim=384, num_layers=2, num_heads=4, num_kv_heads=4
    )

    def make() -> tuple[LlamaLMHeadModel, Any]:
        model = LlamaLMHeadModel.init(hax.Axis("vocab", vocab_size), config, key=jax.random.key(0))
        return shard((model, optimizer.init(model)), mesh)

    return jax.jit(make)()


def shard(tree: Any, mesh: Mesh) -> Any:
    """Fully sharded data parallel: inside a jitted function, split every parameter along its embed axis."""

    def constrain(leaf: Any) -> Any:
        if not isinstance(leaf, hax.NamedArray):
            return leaf
        spec = PartitionSpec(*("data" if axis.name == "embed" else None for axis in leaf.axes))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(constrain, tree, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))


def read_batches(tokenizer: Any, mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """Batches without end, rows split over all devices; every host draws the same rows and places its own."""
    tokens, mask = [], []
    for line in (DATA / "train.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "in words" in record["prompt"]:
            prompt = tokenizer.encode(record["prompt"])
            answer = tokenizer.encode(record["completion"], add_special_tokens=False) + [tokenizer.eos_token_id]
            padding = LENGTH - len(prompt) - len(answer)
            tokens.append(prompt + answer + [0] * padding)
            mask.append([0.0] * len(prompt) + [1.0] * len(answer) + [0.0] * padding)
    columns = {"tokens": np.array(tokens, np.int32), "mask": np.array(mask, np.float32)}
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(0)
    while True:
        chosen = rng.integers(0, len(tokens), BATCH)
        rows = {name: column[chosen] for name, column in columns.items()}
        yield {
            name: jax.make_array_from_callback(values.shape, sharding, lambda index, values=values: values[index])
            for name, values in rows.items()
        }


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--output_dir", default="runs/own_loop", help="samples.jsonl is appended to here")
    options = parser.parse_args()
    train(options.steps, options.eval_every, options.output_dir)


if __name__ == "__main__":
    run_main(main)  # instead of main(): when one host fails, the others are told and end within seconds
