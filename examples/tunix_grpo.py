"""Tunix's GRPO learner with our engine as its rollout, and samples: two lines more than the script without.

Needs ``pip install 'jax-lockstep[tunix]'``. Any number of processes and devices, here one process with four devices::

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/tunix_grpo.py

The model of examples/tunix_sft.py begins with random weights and is rewarded for lower-case letters.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from transformers import AutoTokenizer
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_sft import DATA, make_model

import lockstep
import lockstep.tunix

QUESTIONS, ANSWERS = 4, 8


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of characters that are lower-case letters."""
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in completions]


def batches(steps: int) -> Iterator[dict[str, Any]]:
    """Questions; Tunix wants NumPy arrays of strings."""
    lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    for step in range(steps):
        yield {"prompts": np.array(texts[step * QUESTIONS : (step + 1) * QUESTIONS])}


def train(steps: int, eval_every: int, output_dir: str) -> list[float]:
    """Learn, and sample meanwhile; returns the mean reward of each step."""
    lockstep.start()  # before the first use of JAX
    shape = (jax.device_count() // 2, 2) if jax.device_count() % 2 == 0 else (jax.device_count(), 1)
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizer")
    cluster = RLCluster(
        actor=make_model(mesh, vocab=-(-len(tokenizer) // 128) * 128),
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=lockstep.tunix.Rollout,
            offload_to_cpu=False,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2),
                max_steps=steps,
                eval_every_n_steps=steps + 1,
                mini_batch_size=QUESTIONS,
                train_micro_batch_size=QUESTIONS,
            ),
            rollout_config=RolloutConfig(max_tokens_to_generate=16, max_prompt_length=16, temperature=1.0),
        ),
    )
    samples = lockstep.InferenceEvalConfig(
        prompts=["What is 12 plus 7?"], eval_every=eval_every, at_start=True, max_new_tokens=16
    )
    cluster.actor_trainer.with_training_hooks(lockstep.tunix.sample_hooks(samples, tokenizer, output_dir=output_dir))
    means: list[float] = []

    def noted(*arguments: Any, **options: Any) -> list[float]:
        found = reward(*arguments, **options)
        means.append(float(np.mean(found)))
        return found

    algorithm = GRPOConfig(num_generations=ANSWERS, num_iterations=1, beta=0.0)
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=noted, algo_config=algorithm)
    learner.train(batches(steps))
    print(f"mean reward {means[0]:.2f} at first, {means[-1]:.2f} at last")
    return means


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval_every", type=int, default=10)
    parser.add_argument("--output_dir", default="runs/tunix_grpo", help="samples.jsonl is appended to here")
    options = parser.parse_args()
    train(options.steps, options.eval_every, options.output_dir)


if __name__ == "__main__":
    lockstep.run_main(main)
