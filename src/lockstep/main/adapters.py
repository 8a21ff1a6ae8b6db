"""The frozen model of a run that trains adapters: where it is, which one it is, and how it is read."""

import os
from typing import Protocol

import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.hosts import Hosts
from lockstep.models import LlamaConfig, LoraConfig, LoraModel, fingerprint, load_hf
from lockstep.placement import PARAMETER_AXES
from lockstep.training import SavedAdapters, TrainerConfig


class AdapterFields(Protocol):
    """The part of a run's configuration that is used here."""

    @property
    def trainer(self) -> TrainerConfig:
        """The training loop."""

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters."""

    @property
    def initialize_from_hf(self) -> str | None:
        """The checkpoint of the base model."""


def describe_adapters(config: AdapterFields, model: LlamaConfig) -> SavedAdapters | None:
    """Return what the checkpoints of a run say of its adapters; None where it trains the whole model.

    Args:
        config: The configuration of the run.
        model: The configuration of the base model.

    Raises:
        ConfigError: The adapters do not fit the model, or there is no checkpoint of it.
    """
    base = config.initialize_from_hf
    if config.lora is None or base is None:
        return None
    config.lora.shapes(model)
    return SavedAdapters(
        lora=config.lora.resolved(config.trainer.precision.compute.name),
        base=base if "://" in base else os.path.abspath(os.path.expanduser(base)),
        fingerprint=fingerprint(base),
    )


def load_frozen(adapters: SavedAdapters, model: LlamaConfig, mesh: Mesh, hosts: Hosts) -> LoraModel:
    """Read the base model, for `lockstep.models.join_trained`; every host makes this call.

    Args:
        adapters: What `describe_adapters` returned.
        model: The configuration of the base model.
        mesh: The mesh of the run.
        hosts: The processes of the job.

    Raises:
        PeerError: A host could not read its part; raised on every host.
    """
    hosts.phase("loading the base model")
    dtype = jnp.dtype(adapters.lora.base_dtype)
    base = load_hf(adapters.base, mesh, PARAMETER_AXES, dtype, config=model, hosts=hosts)
    return LoraModel(base=base, adapters=None, scale=adapters.lora.scale)
