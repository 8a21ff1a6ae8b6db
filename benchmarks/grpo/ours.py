"""lockstep's GRPO trainer, with its own engine or with Levanter's: one contestant of `benchmarks.grpo_step`."""

import argparse
import contextlib
import time
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.grpo.load import LOADS, NORM_EPS, ROPE_THETA, GrpoLoad
from benchmarks.grpo.turns import Turns
from lockstep.hosts import Hosts, start
from lockstep.models import WEIGHT_AXES, DecoderWeights, LayerWeights, LlamaConfig, as_trainable
from lockstep.models.rope import RotaryConfig
from lockstep.placement import batch_spec, place
from lockstep.placement.device import Program
from lockstep.text import Prompt, encode, load_tokenizer, token_count
from lockstep.training import GrpoConfig, OptimizerConfig, RolloutConfig, StepInfo, Trainer, TrainerConfig
from lockstep.training.loop.logprobs import LogprobProgram
from lockstep.training.rl import GrpoRunFields, Questions, Rollouts
from lockstep.training.rl.rewards import FunctionReward
from lockstep.training.step.programs import Programs

PHASES = {"rollout_s": "time/rollout_generate_s", "reward_s": "time/reward_s", "update_s": "time/update_s"}


class LastFigures:
    """A tracker that keeps the newest figures."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log(self, metrics: Any, *, step: int) -> None:
        self.values |= metrics

    def log_rows(self, name: str, rows: Any, *, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class BusyTime:
    """Seconds in which devices run programs: each is waited for, so that none runs while the host works.

    It changes `lockstep.placement.device.Program` in this process.
    """

    def __init__(self) -> None:
        self._seconds, launch = 0.0, Program.__call__

        def launch_and_wait(program: Program, *inputs: Any) -> Any:
            began = time.perf_counter()
            results = jax.block_until_ready(launch(program, *inputs))
            self._seconds += time.perf_counter() - began
            return results

        Program.__call__ = launch_and_wait  # type: ignore[method-assign]

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def main() -> None:
    """Train, a step at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=LOADS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokenizer")
    parser.add_argument("--engine", choices=("ours", "levanter"))
    parser.add_argument("--busy", action="store_true", help="wait for each program, and tell how long devices are busy")
    arguments = parser.parse_args()
    load, turns, tracker = LOADS[arguments.load], Turns(arguments.steps), LastFigures()
    trainer, rollouts = make(load, arguments.steps, arguments.tokenizer, arguments.engine, start(), tracker)
    model = first_model(load, trainer.mesh)
    busy = BusyTime() if arguments.busy else None

    def after_step(info: StepInfo) -> None:
        jax.block_until_ready(info.model)
        taken = turns.taken()
        trainer.tracker.flush(60)
        values = tracker.values
        turns.done(
            step_s=taken,
            **{name: values[key] for name, key in PHASES.items()},
            tokens=values["rollout/generated_tokens"],
            reward=values["reward/mean"],
            logprob_gap=values["train/logprob_gap"],
            **({} if busy is None else {"busy_s": busy.take()}),
        )

    trainer.add_hook(after_step)
    turns.ready(logprob=fixed_logprob(load, trainer, model), devices=len(jax.devices()))
    with contextlib.closing(rollouts):
        trainer.train(model, rollouts)


def make(
    load: GrpoLoad, steps: int, tokenizer_path: str, engine: str, hosts: Hosts, tracker: LastFigures
) -> tuple[Trainer, Rollouts]:
    """The trainer and its rollouts, as ``lockstep train-grpo`` makes them."""
    config = TrainerConfig(num_train_steps=steps, train_batch_size=load.answers, mesh_shape="auto")
    optimizer = OptimizerConfig(
        learning_rate=load.learning_rate, weight_decay=0.0, max_grad_norm=None, warmup=0, lr_schedule="constant"
    )
    tokenizer = load_tokenizer(tokenizer_path)
    objective = GrpoConfig(vocab_size=token_count(tokenizer))
    trainer = Trainer(config, optimizer.build(steps), objective, hosts, tracker=tracker)
    prompts = [Prompt(id=i, text=text) for i, text in enumerate(load.texts())]
    tokens = encode(tokenizer, prompts)
    assert {len(each) for each in tokens} == {load.prompt_tokens}
    sampling = RolloutConfig(n_generations=load.group, max_new_tokens=load.new_tokens, ignore_eos=True)
    sampler = None
    if engine == "levanter":
        from benchmarks.grpo.levanter import LevanterEngine

        sampler = LevanterEngine(trainer.mesh)
    rollouts = Rollouts(
        GrpoRunFields(rollout=sampling, rewards=[FunctionReward(function="benchmarks.grpo.load:reward", name="share")]),
        objective,
        Questions(prompts=prompts, tokens=tokens, seed=0, row_length=load.row),
        tokenizer,
        trainer,
        engine=sampler,
    )
    trainer.add_hook(rollouts)
    return trainer, rollouts


def first_model(load: GrpoLoad, mesh: Mesh) -> Any:
    """The model with the first weights, sharded as the trainer shards it."""
    config = LlamaConfig(
        max_seq_len=load.row,
        hidden_dim=load.hidden,
        intermediate_dim=load.mlp,
        num_layers=load.layers,
        num_heads=load.heads,
        num_kv_heads=load.kv_heads,
        layer_norm_epsilon=NORM_EPS,
        rope=RotaryConfig(theta=ROPE_THETA),
        gradient_checkpointing="dots",
    )

    weights = {
        name: place(array, NamedSharding(mesh, PartitionSpec(*(_SPLIT.get(axis) for axis in WEIGHT_AXES[name]))))
        for name, array in load.weights().items()
    }
    outside = {name: weights.pop(name) for name in ("embed", "final_norm", "lm_head")}
    return as_trainable(config, DecoderWeights(layers=LayerWeights(**weights), **outside))


_SPLIT = {"embed": "fsdp"}


def fixed_logprob(load: GrpoLoad, trainer: Trainer, model: Any) -> float:
    """The mean log-probability of rows of tokens that all contestants are asked about."""
    rows = load.fixed_rows()
    program = LogprobProgram(
        "fixed",
        lambda model, batch: GrpoConfig().answer_logprobs(model, batch["tokens"]),
        trainer=trainer.config,
        programs=Programs(trainer.hosts, trainer.mesh),
    )
    batch = {"tokens": place(rows, NamedSharding(trainer.mesh, batch_spec(trainer.mesh)))}
    program.compile(model, batch, microbatches=1)
    return float(program(model, batch).mean())


if __name__ == "__main__":
    main()
