"""What `rollout_ahead` saves where rewards are slow: seconds per step of GRPO on 2 processes × 2 devices.

    python -m benchmarks.rollout_ahead [--json PATH]

32 answers of up to 32 tokens per step from a random model of 3 M parameters. Each answer's reward sleeps; all of a
rollout do at the same time, so that a rollout's rewards take that long after its last answer.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.sizes import sized
from benchmarks.workers import report, run_workers, write_json

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).resolve().parents[1]
BATCH, ROW, NEW, STEPS, WARM = sized(32, 8), 64, sized(32, 4), sized(9, 5), sized(3, 1)
SLEEP = "LOCKSTEP_BENCHMARK_SLEEP_S"
REWARDS_S = sized((0.0, 0.5, 1.0, 2.0), (0.01,))


def main() -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from lockstep.hosts import run_main

        run_main(worker)
        return 0
    (rows,) = run_workers("benchmarks.rollout_ahead", "--worker", processes=2, devices=2)
    for row in rows:
        print(f"rewards of {row['reward_s']:g} s: {row['step_s']:.2f} s per step, ahead {row['ahead_step_s']:.2f} s")
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def slow(row: Any, prompt: Any) -> float:
    """A reward that takes its time."""
    time.sleep(float(os.environ[SLEEP]))
    return float(row.generated_text.count("e") % 2 == 0)


def worker() -> None:
    """One process: runs with and without `rollout_ahead` for each duration of a reward."""
    from lockstep import start

    hosts = start()
    rows = []
    for reward_s in REWARDS_S:
        os.environ[SLEEP] = str(reward_s)
        plain, ahead = (step_seconds(hosts, each) for each in (0, 1))
        rows.append({"reward_s": reward_s, "step_s": plain, "ahead_step_s": ahead})
    hosts.barrier("all have measured")
    if hosts.is_leader:
        report(rows)


def step_seconds(hosts: Any, ahead: int) -> float:
    """The median seconds of a step, without the first ones and the last, before which nothing is sampled ahead."""
    from lockstep.models import as_trainable
    from lockstep.text import token_count
    from lockstep.training import GrpoConfig, OptimizerConfig, RolloutConfig, Trainer, TrainerConfig
    from lockstep.training.rl import GrpoRunFields, Rollouts
    from lockstep.training.rl.rewards import FunctionReward
    from tests import rollouts as runs
    from tests import tiny

    model_config = dataclasses.replace(
        tiny.CONFIG,
        hidden_dim=sized(256, 32),
        intermediate_dim=688,
        num_layers=sized(4, 1),
        num_heads=8,
        num_kv_heads=4,
    )
    vocab_size = token_count(tiny.tokenizer())
    objective = GrpoConfig(use_rollout_logprobs=False, importance_cap=2.0, vocab_size=vocab_size)
    config = TrainerConfig(num_train_steps=STEPS, train_batch_size=BATCH)
    trainer = Trainer(config, OptimizerConfig(learning_rate=1e-4).build(STEPS), objective, hosts)
    model = as_trainable(model_config, tiny.placed_weights(trainer.mesh, config=model_config, vocab=tiny.vocab_size()))
    fields = GrpoRunFields(
        rollout=RolloutConfig(n_generations=8, max_new_tokens=NEW),
        rewards=[FunctionReward(function="benchmarks.rollout_ahead:slow")],
        reward_workers=BATCH // 2,
        rollout_ahead=ahead,
    )
    questions = dataclasses.replace(runs.questions(), row_length=ROW)
    rollouts = Rollouts(fields, objective, questions, tiny.tokenizer(), trainer)
    times: list[float] = []
    trainer.add_hook(rollouts)
    trainer.add_hook(lambda info: times.append(time.perf_counter()))
    with contextlib.closing(rollouts):
        trainer.train(model, rollouts)
    return statistics.median(after - before for before, after in zip(times[WARM:-2], times[WARM + 1 : -1], strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
