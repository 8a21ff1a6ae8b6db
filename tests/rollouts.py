"""A GRPO run so small that a test trains it in seconds; the same numbers on every mesh."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from lockstep.models import Experts, LlamaConfig, LoraConfig, Qwen3MoeConfig
from lockstep.models.trainable import skeleton
from lockstep.placement import place
from lockstep.report.trackers import NoopTracker
from lockstep.text import Prompt, token_count
from lockstep.training import (
    GrpoConfig,
    OptimizerConfig,
    RolloutConfig,
    RunRecord,
    Trainer,
    TrainerConfig,
    parameter_shardings,
)
from lockstep.training.rl import GrpoRunFields, Questions, Rollouts
from lockstep.training.rl.rewards import FunctionReward, LengthReward
from lockstep.training.rl.rollout import FrozenModels
from tests import tiny
from tests.adapters import with_adapters

BATCH, GROUP, ROW, NEW = 16, 4, 24, 8
EXPERTS = Qwen3MoeConfig(
    max_seq_len=ROW, hidden_dim=32, intermediate_dim=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    experts=Experts(num_experts=6, num_experts_per_tok=2, intermediate_dim=16),
)  # fmt: skip
AHEAD = {"use_rollout_logprobs": False, "importance_cap": 2.0}
"""The settings of the loss that ``rollout_ahead`` needs."""


def parity(row: Any, prompt: Any) -> float:
    """A reward without a model behind it: whether the text has an even number of letters e."""
    return float(row.generated_text.count("e") % 2 == 0)


class Recorder(NoopTracker):
    """A tracker that keeps everything; rows are those of one table."""

    def __init__(self, table: str = "rollout/answers") -> None:
        self._table = table
        self.scalars: dict[int, dict[str, float]] = {}
        self.rows: list[Any] = []

    def log(self, metrics: Any, *, step: int) -> None:
        self.scalars.setdefault(step, {}).update(metrics)

    def log_rows(self, name: str, rows: Any, *, step: int) -> None:
        assert name == self._table
        self.rows.extend(rows)


def questions(count: int = 12, tokenizer: Any = None) -> Questions:
    """Sums, tokenised by the demo's tokenizer."""
    tokenizer = tokenizer or tiny.tokenizer()
    prompts = [Prompt(id=i, text=f"What is {i} plus {3 * i}?", answer=f"#### {4 * i}") for i in range(count)]
    tokens = [tuple(tokenizer.encode(prompt.text)) for prompt in prompts]
    return Questions(prompts=prompts, tokens=tokens, seed=0, row_length=ROW)


def fields(**values: Any) -> GrpoRunFields:
    """Settings with a reward that differs between answers from the beginning."""
    rewards = [FunctionReward(function="tests.rollouts:parity"), LengthReward(weight=-0.5)]
    rollout = RolloutConfig(**{"n_generations": GROUP, "max_new_tokens": NEW} | values.pop("rollout", {}))
    return GrpoRunFields(**{"rollout": rollout, "rewards": rewards, "reward_timeout_s": 20.0} | values)


def objective_of(settings: GrpoRunFields, tokenizer: Any = None, **loss: Any) -> GrpoConfig:
    """The loss, whose policy is the one that is sampled."""
    temperature, vocab_size = settings.rollout.temperature, token_count(tokenizer or tiny.tokenizer())
    return GrpoConfig(temperature=temperature, vocab_size=vocab_size, **loss)


def make(
    mesh_shape: str = "auto",
    steps: int = 3,
    hosts: Any = None,
    tracker: Any = None,
    loss: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    optimizer: Any = None,
    engine: Any = None,
    vocab: int | None = None,
    model: LlamaConfig = tiny.CONFIG,
    lora: LoraConfig | None = None,
    row: int | None = None,
    tokenizer: Any = None,
    asked: Questions | None = None,
    **trainer_values: Any,
) -> tuple[Trainer, Rollouts, Any]:
    """A trainer, its rollouts, and a model with random weights, or what to go on from."""
    settings = fields(**(run or {}))
    tokenizer = tokenizer or tiny.tokenizer()
    objective = objective_of(settings, tokenizer, **(loss or {}))
    config = TrainerConfig(num_train_steps=steps, train_batch_size=BATCH, mesh_shape=mesh_shape, **trainer_values)
    if optimizer is None:
        optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0).build(steps)
    directory = None if config.run_id is None else Path(config.log_dir) / config.run_id
    trainer = Trainer(config, optimizer, objective, hosts, tracker=tracker, run=RunRecord(directory=directory))
    initial = tiny.init_model(trainer, vocab, model) if model.experts is None else drawn(model, trainer.mesh)
    reference = None if objective.kl_coefficient == 0 else initial if lora else trainer.frozen_copy(initial)
    initial = initial if lora is None else with_adapters(initial, lora, new=True)
    teacher = trainer.frozen_copy(drawn(model, trainer.mesh)) if objective.teacher_coefficient else None
    rollouts = Rollouts(
        settings,
        objective,
        dataclasses.replace(asked or questions(tokenizer=tokenizer), row_length=ROW if row is None else row),
        tokenizer,
        trainer,
        frozen=FrozenModels(reference, teacher),
        engine=engine,
        model=model,
    )
    trainer.add_hook(rollouts)
    return trainer, rollouts, initial


def drawn(config: LlamaConfig, mesh: Any) -> Any:
    """A model with random weights, the same on every mesh."""
    rng, model = np.random.default_rng(0), skeleton(tiny.vocab_size(), config)

    def draw(leaf: Any, sharding: Any) -> Any:
        values = 0.3 * rng.standard_normal([axis.size for axis in leaf.axes]).astype(np.float32)
        return hax.named(place(values, jax.tree.leaves(sharding)[0]), leaf.axes)

    shardings = parameter_shardings(model, mesh)
    return jax.tree.map(draw, model, shardings, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))


@dataclasses.dataclass
class Spy:
    """What each rollout of a run was, taken when its first update is done."""

    rollouts: Rollouts
    found: dict[int, dict[str, list[Any]]] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)

    def __call__(self, info: Any) -> None:
        self.losses.append(info.loss)
        rollout = self.rollouts.rollout
        assert rollout is not None
        self.found.setdefault(rollout.number, {name: column.tolist() for name, column in rollout.columns.items()})


def train(trainer: Trainer, rollouts: Rollouts, model: Any) -> Spy:
    """Train to the end."""
    spy = Spy(rollouts)
    trainer.add_hook(spy)
    with contextlib.closing(rollouts):
        trainer.train(model, rollouts)
    return spy


def assert_close(one: Any, other: Any) -> None:
    """The columns of two rollouts are the same but for rounding."""
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=2e-4, atol=2e-5, err_msg=name)


def letters(row: Any, prompt: Any) -> float:
    """A reward that a few steps can raise: the letters e per token of the answer."""
    return float(row.generated_text.count("e") / row.num_tokens)
