"""Tunix's SFT trainer with samples: one line more than the script without.

Needs ``pip install 'jax-lockstep[tunix]'``. One process with any number of devices, here four simulated ones::

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/tunix_sft.py

Training data are the demo's words and numbers; the model is a small Qwen3 that begins with random weights.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from tunix.models.qwen3 import model as qwen3
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

import lockstep
import lockstep.tunix

DATA = Path(__file__).resolve().parents[1] / "data" / "demo"
LENGTH = 32


def make_model(mesh: jax.sharding.Mesh, vocab: int) -> qwen3.Qwen3:
    """A small Qwen3 with random weights, sharded as its configuration says."""
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=vocab,
        embed_dim=64,
        hidden_dim=192,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
    )

    @nnx.jit
    def make() -> qwen3.Qwen3:
        rngs = nnx.Rngs(0)
        model = qwen3.Qwen3(config, rngs=rngs)
        for layer in model.layers:  # Tunix makes these of zeros, for a checkpoint to fill
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                linear.kernel[...] = 0.1 * jax.random.normal(rngs.params(), linear.kernel.shape)
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    with mesh:
        return make()


def batches(tokenizer: PreTrainedTokenizerBase, steps: int, size: int) -> Iterator[TrainingInput]:
    """Questions with their answers; the loss is that of the answers."""
    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for step in range(steps):
        tokens = np.zeros((size, LENGTH), np.int32)
        mask = np.zeros((size, LENGTH), bool)
        for at in range(size):
            row = rows[(step * size + at) % len(rows)]
            prompt = tokenizer.encode(row["prompt"])
            answer = [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
            ids = [*prompt, *answer][:LENGTH]
            tokens[at, : len(ids)] = ids
            mask[at, len(prompt) : len(ids)] = True
        yield TrainingInput(input_tokens=tokens, input_mask=mask)


def model_input(batch: TrainingInput) -> dict[str, jax.Array]:
    """What Tunix's loss wants of a batch."""
    known = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": build_positions_from_mask(known),
        "attention_mask": make_causal_attn_mask(known),
    }


def train(steps: int, eval_every: int, output_dir: str) -> None:
    """Train, and sample meanwhile."""
    lockstep.start()  # before the first use of JAX
    shape = (jax.device_count() // 2, 2) if jax.device_count() % 2 == 0 else (jax.device_count(), 1)
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizer")
    model = make_model(mesh, vocab=-(-len(tokenizer) // 128) * 128)
    config = TrainingConfig(eval_every_n_steps=steps + 1, max_steps=steps)
    trainer = PeftTrainer(model, optax.adamw(3e-3), config).with_gen_model_input_fn(model_input)

    samples = lockstep.InferenceEvalConfig(
        prompts=["What is 12 plus 7?", "What is 40 in words?"], eval_every=eval_every, at_start=True, max_new_tokens=16
    )
    trainer.with_training_hooks(lockstep.tunix.sample_hooks(samples, tokenizer, model=model, output_dir=output_dir))
    with mesh:
        trainer.train(batches(tokenizer, steps, size=16))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--output_dir", default="runs/tunix_sft", help="samples.jsonl is appended to here")
    options = parser.parse_args()
    train(options.steps, options.eval_every, options.output_dir)


if __name__ == "__main__":
    lockstep.run_main(main)
