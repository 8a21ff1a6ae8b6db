"""The engine of the model that trains; models of one process alone: tests/multiprocess/test_own_models.py."""

import dataclasses

import jax
import numpy as np
import pytest

from lockstep.callback.evaluation import ModelEngine
from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.placement import make_mesh
from tests import tiny

HOSTS = Hosts(MemoryClient.hub(1)[0])


def weights_on(count):
    mesh = make_mesh(f"1,{count},1", jax.devices()[:count])
    return tiny.placed_weights(mesh, vocab=tiny.vocab_size())


def test_there_is_one_engine_for_each_mesh_and_its_auditor_is_of_that_mesh():
    models = ModelEngine(EngineConfig(), tiny.tokenizer(), audit=True)
    assert models.engine is None and models.auditor() is None
    first, (config, _) = models.read((tiny.CONFIG, weights_on(1)), HOSTS)
    again, _ = models.read((tiny.CONFIG, weights_on(1)), HOSTS)
    assert first is again and config == tiny.CONFIG and models.auditor() is models.auditor()
    other, _ = models.read((tiny.CONFIG, weights_on(2)), HOSTS)
    assert other is not first and models.auditor().mesh == other.mesh


def test_weights_that_rounds_cannot_compute_with_are_refused_by_name():
    models, weights = ModelEngine(EngineConfig(), tiny.tokenizer()), weights_on(1)
    host = jax.tree.map(np.asarray, weights)
    with pytest.raises(ConfigError, match="the weight embed is a ndarray in the memory of the host, on no device"):
        models.read((tiny.CONFIG, host), HOSTS)
    with jax.enable_x64(True):
        wide = dataclasses.replace(weights, final_norm=jax.device_put(host.final_norm.astype(np.float64)))
    with pytest.raises(ConfigError, match="final_norm is float64, and rounds compute in at most 32 bits"):
        models.read((tiny.CONFIG, wide), HOSTS)
