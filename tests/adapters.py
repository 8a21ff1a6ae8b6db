"""Adapters with random factors on a tiny model, and the model that they make of it, by NumPy."""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import (
    RANK,
    LlamaLMHeadModel,
    LoraConfig,
    LoraModel,
    as_trainable,
    fingerprint,
    load_hf,
    read_decoder,
    save_hf,
)
from lockstep.placement import PARAMETER_AXES, make_mesh, mesh_of, place
from lockstep.training import CheckpointerConfig, model_spec, save_tokenizer
from lockstep.training.checkpoints.checkpointer import Checkpointer
from lockstep.training.checkpoints.saved_model import SavedAdapters
from lockstep.training.step.train_state import TrainState
from tests import tiny

LORA = LoraConfig(r=3, alpha=6.0)
MLPS = LoraConfig(r=3, alpha=6.0, target_modules=("gate_proj", "up_proj", "down_proj"))
GATE_UP = LoraConfig(r=3, alpha=6.0, target_modules=("gate_up_proj", "down_proj"))
"""Those of a family whose experts have gate and up in one."""


def with_adapters(base: LlamaLMHeadModel, lora: LoraConfig = LORA, seed: int = 7, *, new: bool = False) -> LoraModel:
    """Adapters that change the model visibly, sharded as the trainer shards them; nothing is compiled.

    Args:
        new: Whether they change nothing yet.
    """
    mesh = mesh_of(base.embed.array)
    rng = np.random.default_rng(seed)

    def draw(leaf: hax.NamedArray) -> hax.NamedArray:
        values = 0.3 * rng.standard_normal([axis.size for axis in leaf.axes]).astype(np.float32)
        values *= not (new and leaf.axes[1].name == RANK)
        spec = jax.sharding.PartitionSpec(*(PARAMETER_AXES.get(axis.name) for axis in leaf.axes))
        return hax.named(place(values, jax.sharding.NamedSharding(mesh, spec)), leaf.axes)

    pairs = jax.tree.map(draw, lora.shapes(base.config), is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
    return LoraModel(base=base, adapters=pairs, scale=lora.scale)


def numpy_merged(model: LoraModel) -> dict[str, np.ndarray]:
    """``W + scale A B`` of every adapted weight, in float64: both sides of a layer flattened, a product of matrices."""
    found = {}
    for name, pair in model.pairs.items():
        weight, a, b = (np.asarray(part.array, np.float64) for part in (model.weight(name), pair.a, pair.b))
        rank, stack = a.shape[-1], a.shape[: 2 if name.startswith("expert_") else 1]
        delta = a.reshape(*stack, -1, rank) @ b.reshape(*stack, rank, -1)
        found[name] = weight + model.scale * delta.reshape(weight.shape)
    return found


def merged(model: LoraModel) -> LlamaLMHeadModel:
    """The model with those weights, in float32 and sharded as the base."""
    return model.with_weights(
        {
            name: place(weight.astype(np.float32), model.weight(name).array.sharding)
            for name, weight in numpy_merged(model).items()
        }
    )


def mesh_of_model(model: Any) -> jax.sharding.Mesh:
    """The mesh that a model is on."""
    return mesh_of(read_decoder(model)[1].embed)


def save_base(path: str, model: LlamaLMHeadModel | None = None) -> None:
    """The tiny model, or another one, as a Hugging Face checkpoint with the demo's tokenizer."""
    if model is None:
        model = as_trainable(tiny.CONFIG, tiny.placed_weights(make_mesh("auto"), vocab=tiny.vocab_size()))
    save_hf(model, path, tokenizer=tiny.tokenizer(), hosts=Hosts(MemoryClient.hub(1)[0]))


def save_checkpoint(
    path: str, base: str, lora: LoraConfig = LORA, step: int = 4, base_dtype: str = "float32"
) -> LoraModel:
    """A training checkpoint of random adapters for a Hugging Face checkpoint; the model that they make with it."""
    lora = dataclasses.replace(lora, base_dtype=base_dtype)
    model = with_adapters(load_hf(base, make_mesh("auto"), dtype=jnp.dtype(base_dtype)), lora)
    checkpointer = Checkpointer(
        CheckpointerConfig(),
        path,
        Hosts(MemoryClient.hub(1)[0]),
        facts={},
        run_config={"tokenizer": tiny.TOKENIZER},
        reported=lambda: True,
        model=model_spec(
            model.config, tiny.vocab_size(), SavedAdapters(lora=lora, base=base, fingerprint=fingerprint(base))
        ),
    )
    placed = place(np.int32(4), jax.NamedSharding(make_mesh("auto"), jax.P()))
    state, _ = TrainState(step=placed, model=model, opt_state=()).split()
    checkpointer.save(state, step=4, loss=1.0, hooks={}, hooks_called=True)
    checkpointer.wait()
    assert checkpointer.errors == 0
    save_tokenizer(path, tiny.tokenizer())
    return model
