"""The session of the model that trains; models of one process alone: tests/multiprocess/test_own_models.py."""

import dataclasses

import jax
import numpy as np
import pytest

from lockstep.callback.evaluation import ModelSession
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
    session = ModelSession(EngineConfig(), tiny.tokenizer(), audit=True)
    assert session.engine is None and session.auditor() is None
    config, _ = session.read(HOSTS, (tiny.CONFIG, weights_on(1)))
    first, auditor = session.engine, session.auditor()
    session.read(HOSTS, (tiny.CONFIG, weights_on(1)))
    assert session.engine is first and config == tiny.CONFIG and session.auditor() is auditor
    session.read(HOSTS, (tiny.CONFIG, weights_on(2)))
    assert session.engine is not first and session.auditor().mesh == session.engine.mesh


def test_weights_that_rounds_cannot_compute_with_are_refused_by_name():
    session, weights = ModelSession(EngineConfig(), tiny.tokenizer()), weights_on(1)
    host = jax.tree.map(np.asarray, weights)
    with pytest.raises(ConfigError, match="the weight embed is a ndarray in the memory of the host, on no device"):
        session.read(HOSTS, (tiny.CONFIG, host))

    def moved(weights, kind):
        return jax.device_put(weights, jax.tree.map(lambda array: array.sharding.with_memory_kind(kind), weights))

    offloaded = moved(weights, "pinned_host")
    with pytest.raises(ConfigError, match="embed is in memory of kind 'pinned_host'.*with_memory_kind.'device'"):
        session.read(HOSTS, (tiny.CONFIG, offloaded))
    session.read(HOSTS, (tiny.CONFIG, moved(offloaded, "device")))
    numbers = dataclasses.replace(weights, final_norm=weights.final_norm.astype(np.int8))
    with pytest.raises(ConfigError, match="final_norm is int8, and rounds compute with floats.* dequantised"):
        session.read(HOSTS, (tiny.CONFIG, numbers))
    with jax.enable_x64(True):
        wide = dataclasses.replace(weights, final_norm=jax.device_put(host.final_norm.astype(np.float64)))
    with pytest.raises(ConfigError, match="final_norm is float64, and rounds compute in at most 32 bits"):
        session.read(HOSTS, (tiny.CONFIG, wide))


def test_weights_that_a_loop_has_given_away_or_is_tracing_are_refused_by_what_to_do():
    session, weights = ModelSession(EngineConfig(), tiny.tokenizer()), weights_on(1)

    def traced(final_norm):
        return session.read(HOSTS, (tiny.CONFIG, dataclasses.replace(weights, final_norm=final_norm)))

    with pytest.raises(ConfigError, match="final_norm is a value of a function that is being traced.* outside jit"):
        jax.jit(traced)(weights.final_norm)
    weights.final_norm.delete()
    with pytest.raises(ConfigError, match="final_norm is deleted: its memory was donated.* last train step returned"):
        session.read(HOSTS, (tiny.CONFIG, weights))
