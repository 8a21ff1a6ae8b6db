"""Tunix's GRPO learner with its own ("vanilla") rollout or with ours: two contestants of `benchmarks.grpo_step`.

It is configured as Tunix's examples are: model, rollout and trainer share one mesh and so their weights; no reference
model, for there is no penalty.
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama3
from tunix.rl import rl_cluster as cluster_lib
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

import lockstep.tunix
from benchmarks.grpo.load import LOADS, NORM_EPS, QUESTIONS, ROPE_THETA, GrpoLoad, share
from benchmarks.grpo.turns import Turns


class Clock:
    """Seconds of the calls of a step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, with its time noted until the devices are done with what it returns."""

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            found = call(*args, **options)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return found

        return timed


def main() -> None:
    """Train, a step at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=LOADS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokenizer")
    parser.add_argument("--rollout", choices=("vanilla", "lockstep"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    load, turns, clock = LOADS[arguments.load], Turns(arguments.steps), Clock()
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with mesh:
        model = first_model(load, mesh)
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        sampling = RolloutConfig(
            max_tokens_to_generate=load.new_tokens,
            max_prompt_length=load.prompt_tokens,
            kv_cache_size=load.row,
            temperature=1.0,
            top_p=1.0,
            eos_tokens=[load.vocab],  # there is no such token, so no answer ends early
        )
        cluster = make_cluster(load, mesh, model, tokenizer, sampling, arguments.steps, arguments.rollout)
        rewards: list[float] = []
        tokens: list[int] = []

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            found = [share(text) for text in completions]
            rewards[:] = found
            return found

        generate = clock.timed("rollout_s", cluster.generate)

        def counted(*args: Any, **options: Any) -> Any:
            found = generate(*args, **options)
            tokens[:] = [len(each) for each in found.tokens]
            prompts = np.asarray(found.left_padded_prompt_tokens)
            assert prompts.shape == (load.answers, load.prompt_tokens), prompts.shape
            return found

        update = cluster.update_actor

        def updated(*args: Any, **options: Any) -> None:
            update(*args, **options)
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))

        cluster.generate, cluster.update_actor = counted, clock.timed("update_s", updated)
        learner = GRPOLearner(
            rl_cluster=cluster,
            reward_fns=reward,
            algo_config=GRPOConfig(num_generations=load.group, num_iterations=1, beta=0.0, epsilon=0.2),
        )
        learner._compute_rewards = clock.timed("reward_s", learner._compute_rewards)

        def report(taken: float) -> None:
            turns.done(step_s=taken, **clock.seconds, tokens=sum(tokens), reward=float(np.mean(rewards)))
            clock.seconds.clear()

        turns.ready(logprob=fixed_logprob(load, model), devices=len(jax.devices()))
        learner.train(batches(load, arguments.steps, sampling, turns, report))
        report(turns.taken())


def batches(
    load: GrpoLoad, steps: int, sampling: RolloutConfig, turns: Turns, report: Callable[[float], None]
) -> Iterator[dict[str, Any]]:
    """The questions of each step. A step begins when they are asked for, and ends when the next ones are."""
    texts = load.texts()
    for step in range(steps):
        if step:
            report(turns.taken())
        sampling.seed = jax.random.PRNGKey(step)  # without, every step would have the same draws
        begin = step * load.prompts % QUESTIONS
        yield {"prompts": np.array(texts[begin : begin + load.prompts])}


def make_cluster(
    load: GrpoLoad,
    mesh: Mesh,
    model: llama3.Llama3,
    tokenizer: Any,
    sampling: RolloutConfig,
    steps: int,
    rollout: str,
) -> cluster_lib.RLCluster:
    """Actor and rollout on one mesh, with one update per rollout."""
    training = cluster_lib.RLTrainingConfig(
        actor_optimizer=optax.adam(load.learning_rate, b1=0.9, b2=0.95, eps=1e-8),
        max_steps=steps,
        eval_every_n_steps=steps + 1,
        mini_batch_size=load.prompts,
        train_micro_batch_size=load.prompts,
        data_sharding_axis=("fsdp",),
    )
    roles = (cluster_lib.Role.ACTOR, cluster_lib.Role.REFERENCE, cluster_lib.Role.ROLLOUT)
    return cluster_lib.RLCluster(
        actor=model,
        tokenizer=tokenizer,
        cluster_config=cluster_lib.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=rollout if rollout == "vanilla" else lockstep.tunix.Rollout,
            offload_to_cpu=False,
            training_config=training,
            rollout_config=sampling,
        ),
    )


def first_model(load: GrpoLoad, mesh: Mesh) -> llama3.Llama3:
    """Tunix's Llama with the first weights, sharded as it says."""
    config = llama3.ModelConfig(
        num_layers=load.layers,
        vocab_size=load.vocab,
        embed_dim=load.hidden,
        hidden_dim=load.mlp,
        num_heads=load.heads,
        head_dim=load.head,
        num_kv_heads=load.kv_heads,
        rope_theta=int(ROPE_THETA),
        norm_eps=NORM_EPS,
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    state, ours = nnx.state(model), load.weights()
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(state)))
    for path, variable in nnx.to_flat_state(state):
        (name,) = (OURS[part] for part in path if part in OURS)
        array = ours[name][path[1]] if path[0] == "layers" else ours[name]
        sharding = NamedSharding(mesh, specs[path].value)
        variable.value = jax.device_put(array.reshape(variable.value.shape), sharding)
    nnx.update(model, state)
    return model


OURS = {
    "input_embedding": "embed",
    "final_norm": "final_norm",
    "lm_head": "lm_head",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")},
}
"""lockstep's name of the weight that a part of a path in Tunix's model belongs to."""


def fixed_logprob(load: GrpoLoad, model: llama3.Llama3) -> float:
    """The mean log-probability of rows of tokens that all contestants are asked about."""
    rows = load.fixed_rows()
    positions = jnp.broadcast_to(jnp.arange(load.row), rows.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((load.row, load.row), bool)), (len(rows), load.row, load.row))
    logits, _ = nnx.jit(lambda model: model(jnp.asarray(rows), positions, None, mask))(model)
    found = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
    return float(jnp.take_along_axis(found, jnp.asarray(rows)[:, 1:, None], axis=-1).mean())


if __name__ == "__main__":
    main()
