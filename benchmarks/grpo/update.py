"""The update of answers as long as GSM8K's, packed into rows or with a row each: contestants of `grpo_step`."""

import argparse

import jax
import numpy as np

from benchmarks.grpo.load import UPDATES, UpdateLoad
from benchmarks.grpo.ours import first_model
from benchmarks.grpo.turns import Turns
from lockstep.hosts import start
from lockstep.placement import batch_spec, data_shards, host_rows, place_local
from lockstep.training import GrpoConfig, OptimizerConfig, StepInfo, Trainer, TrainerConfig, batch_structs
from lockstep.training.rl.packing import Packing, packed_columns
from lockstep.training.rl.rollout import Rollout


class PaddedRows:
    """The same answers in every step, a row each (`lockstep.training.loop.batch_source.BatchSource`)."""

    def __init__(self, rollout: Rollout, mesh: jax.sharding.Mesh) -> None:
        self.rollout, self.mesh, self.count = rollout, mesh, len(rollout.lengths)

    def columns(self) -> dict[str, jax.ShapeDtypeStruct]:
        columns = self.rollout.columns
        return {name: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype) for name, rows in columns.items()}

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return batch_structs(self.columns(), self.count, self.mesh)

    def batch(self, step: int, model: object) -> dict[str, jax.Array]:
        sharding = jax.sharding.NamedSharding(self.mesh, batch_spec(self.mesh))
        own = host_rows(sharding, self.count)
        return {name: place_local(rows[own], sharding, self.count) for name, rows in self.rollout.columns.items()}

    def prepare(self, step: int) -> None: ...

    def close(self) -> None: ...


class PackedRows(PaddedRows):
    """The same in packed rows, which are packed anew in each step (`PackedBatches`)."""

    packing: Packing | None = None

    @property
    def filled_rows(self) -> int:
        return 0 if self.packing is None else self.packing.filled

    def columns(self) -> dict[str, jax.ShapeDtypeStruct]:
        return packed_columns(super().columns())

    def batch(self, step: int, model: object) -> dict[str, jax.Array]:
        self.packing = self.rollout.packing(slice(0, self.count), data_shards(self.mesh), learned=True)
        return self.packing.place(self.rollout.columns, self.mesh)


def rollout_of(load: UpdateLoad) -> Rollout:
    """Answers of random tokens."""
    rng = np.random.default_rng(3)
    prompts = rng.integers(load.shortest_prompt, load.longest_prompt + 1, load.answers)[:, None]
    lengths = prompts + rng.integers(load.shortest_answer, load.longest_answer + 1, load.answers)[:, None]
    position = np.arange(load.model.row)
    shape = (load.answers, load.model.row)
    columns = {
        "tokens": np.where(position < lengths, rng.integers(3, load.model.vocab, shape), 0).astype(np.int32),
        "loss_mask": (position >= prompts) & (position < lengths),
        "advantage": rng.standard_normal(load.answers).astype(np.float32),
        "rollout_logprobs": np.full(shape, -np.log(load.model.vocab), np.float32),
    }
    return Rollout(number=0, columns=columns, lengths=lengths[:, 0])


def main() -> None:
    """Train, a step at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", choices=("packed", "padded"))
    parser.add_argument("--load", choices=UPDATES)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    load, turns = UPDATES[arguments.load], Turns(arguments.steps)
    config = TrainerConfig(
        num_train_steps=arguments.steps, train_batch_size=load.answers, per_device_parallelism=load.rows_at_a_time
    )
    optimizer = OptimizerConfig(learning_rate=load.model.learning_rate, warmup=0, lr_schedule="constant")
    trainer = Trainer(config, optimizer.build(arguments.steps), GrpoConfig(), start())
    source = (PackedRows if arguments.rows == "packed" else PaddedRows)(rollout_of(load), trainer.mesh)

    def after_step(info: StepInfo) -> None:
        jax.block_until_ready(info.model)
        rows = source.filled_rows if isinstance(source, PackedRows) else source.count
        turns.done(update_s=turns.taken(), loss=info.loss, rows=rows, tokens=int(source.rollout.lengths.sum()))

    trainer.add_hook(after_step)
    model = first_model(load.model, trainer.mesh)
    turns.ready(devices=len(jax.devices()))
    trainer.train(model, source)


if __name__ == "__main__":
    main()
