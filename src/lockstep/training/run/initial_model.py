"""The model of a run before its first step: its shape, its adapters, and its weights, drawn or read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import haliax as hax
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from lockstep.hosts import Hosts
from lockstep.models import (
    LlamaConfig,
    LlamaLMHeadModel,
    LoraModel,
    config_to_hf,
    fingerprint,
    join_trained,
    load_config,
    load_hf,
    read_vocab_size,
)
from lockstep.placement import parameter_axes
from lockstep.text import token_count
from lockstep.training.checkpoints.saved_model import SavedAdapters
from lockstep.training.loop.trainer import Trainer
from lockstep.training.run.config import TrainConfig
from lockstep.urls import absolute_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def describe_adapters(config: TrainConfig, model: LlamaConfig) -> SavedAdapters | None:
    """Return the adapters of a run as its checkpoints describe them; None where it trains the whole model.

    Raises:
        ConfigError: The adapters do not fit the model, or there is no checkpoint of it.
    """
    base = config.initialize_from_hf
    if config.lora is None or base is None:
        return None
    config.lora.shapes(model)
    return SavedAdapters(
        lora=config.lora.resolved(config.trainer.precision.compute.name),
        base=absolute_path(base),
        fingerprint=fingerprint(base),
    )


def load_frozen(adapters: SavedAdapters, model: LlamaConfig, mesh: Mesh, hosts: Hosts) -> LoraModel:
    """Read the base model, for `lockstep.models.join_trained`; every host makes this call.

    Raises:
        PeerError: A host could not read its part; raised on every host.
    """
    hosts.phase("loading the base model")
    dtype = jnp.dtype(adapters.lora.base_dtype)
    base = load_hf(adapters.base, mesh, parameter_axes(mesh), dtype, config=model, hosts=hosts)
    return LoraModel(base=base, adapters=None, scale=adapters.lora.scale)


def model_shape(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> tuple[LlamaConfig, int]:
    """Configuration and number of token ids, before any weight is drawn or read."""
    if config.initialize_from_hf is not None:
        shape = config.trainer.with_run_settings(load_config(config.initialize_from_hf))
        if config.gradient_checkpointing is not None:
            shape = dataclasses.replace(shape, gradient_checkpointing=config.gradient_checkpointing)
        return shape, read_vocab_size(config.initialize_from_hf)
    assert isinstance(config.model, LlamaConfig)
    token_ids = token_count(tokenizer)
    if config.hf_save_path is not None:
        config_to_hf(config.model, token_ids)  # refuses now what could not be saved after the last step
    return config.trainer.with_run_settings(config.model), token_ids


def initializer(model: LlamaConfig, vocab_size: int, adapters: SavedAdapters | None) -> Callable[[jax.Array], PyTree]:
    """Return the function of a key that draws the weights that are trained: the model, or its adapters alone."""
    if adapters is not None:
        return functools.partial(adapters.lora.init, model)
    return lambda key: LlamaLMHeadModel.init(hax.Axis("vocab", vocab_size), model, key=key)


def make_model(
    config: TrainConfig,
    model_config: LlamaConfig,
    init: Callable[[jax.Array], PyTree],
    frozen: PyTree,
    trainer: Trainer,
    hosts: Hosts,
) -> PyTree:
    """Return the model before the first step, drawn or read; every host makes this call."""
    if config.initialize_from_hf is None or frozen is not None:
        return join_trained(trainer.init_model(init), frozen)
    dtype = config.trainer.precision.param
    axes = parameter_axes(trainer.mesh)
    return load_hf(config.initialize_from_hf, trainer.mesh, axes, dtype, config=model_config, hosts=hosts)
