"""Real Levanter training runs, small: what the tests of the hook run in every process."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jmp
import levanter.tracker
import numpy as np
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig

from tests import tiny
from tests.levanter_models import LLAMA

LENGTH = 24
FSDP: dict[str, int] = {"data": -1}
TENSOR: dict[str, int] = {"data": -1, "model": 2}


def snowball_mesh(**axes: int) -> MeshConfig:
    """The axes that Snowball names itself, its batch and its vocabulary over them; those not given have one device."""
    mapping: dict[str, Any] = {"batch": ["replica_dcn", "data", "expert"], "vocab": "model"}
    if "context" in axes:
        mapping["position"] = "context"  # Levanter's loss refuses it where the axis has one device
    return MeshConfig(axes={"context": 1, "expert": 1} | axes, compute_mapping=mapping)


def trainer_config(
    directory: str | Path, steps: int, mesh: dict[str, int] | MeshConfig, **values: Any
) -> TrainerConfig:
    """A configuration as a user writes it, everything below ``directory``.

    Args:
        mesh: Levanter's configuration of the mesh, or its axes alone.
    """
    os.environ["WANDB_DIR"] = str(directory)
    settings = {
        "id": "test",
        "seed": 0,
        "num_train_steps": steps,
        "train_batch_size": 8,
        "mesh": mesh if isinstance(mesh, MeshConfig) else MeshConfig(axes=mesh),
        "tracker": WandbConfig(mode="offline", save_code=False),
        "log_dir": Path(directory) / "logs",
        "checkpointer": CheckpointerConfig(base_path=str(Path(directory) / "checkpoints"), save_interval=None),
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "require_accelerator": False,
        "steps_per_eval": 10,
        "mp": jmp.get_policy("f32"),
    }
    return TrainerConfig(**(settings | values))


@functools.cache
def examples(count: int = 192) -> list[LmExample]:
    """Random training examples; made by eager launches, so make them before launches are recorded."""
    rng = np.random.default_rng(0)
    Pos = hax.Axis("position", LENGTH)
    rows = rng.integers(0, tiny.vocab_size(), (count, LENGTH)).astype(np.int32)
    return [LmExample.causal(hax.named(jax.numpy.asarray(row), Pos)) for row in rows]


def train(
    config: TrainerConfig, add_hooks: Callable[[Trainer, Any], None], *, model: Any = LLAMA, learning_rate: float = 1e-2
) -> Any:
    """Levanter's own loop, as its ``train_lm`` has it.

    Args:
        config: The configuration of the trainer.
        add_hooks: A function that is called with the trainer and the state, where a user adds hooks.
        model: The configuration of the model.
        learning_rate: high, so that the weights change visibly.

    Returns:
        The last ``StepInfo``.
    """
    config.initialize()
    optimizer = AdamConfig(learning_rate=learning_rate, warmup=0.0, lr_schedule="constant").build(
        config.num_train_steps
    )
    data = examples()

    def loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
        with levanter.tracker.defer_tracker_for_jit():  # Mixtral logs in what is differentiated, which JAX refuses
            return model.compute_next_token_loss(example, key=key)

    with Trainer(config, optimizer, loss) as trainer:
        Vocab = hax.Axis("vocab", tiny.vocab_size())
        model_key, training_key = jax.random.split(jax.random.PRNGKey(config.seed))
        state = trainer.initial_state(training_key, model_init=lambda: model.build(Vocab, key=model_key))
        add_hooks(trainer, state)
        loader = trainer.data_loader(ListAsyncDataset(data)).iter_from_step(int(state.step))
        info = trainer.train(state, loader)
    trainer.tracker.finish()
    return info


__all__ = ["FSDP", "TENSOR", "NoopConfig", "examples", "train", "trainer_config"]
