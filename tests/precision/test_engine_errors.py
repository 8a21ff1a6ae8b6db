"""In bfloat16 an error in the engine shows: it makes the gap of an audit more than twice what rounding makes."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from benchmarks import engine_errors
from lockstep.engine import Auditor, AuditResult, Engine, EngineConfig
from lockstep.placement import place
from tests import tiny
from tests.unit.engine.models import mesh_of

pytestmark = pytest.mark.optimized

CONFIG = dataclasses.replace(tiny.CONFIG, qkv_bias=True)
ENGINE = EngineConfig(dtype="bfloat16", page_size=8)
REQUESTS = tiny.requests()  # greedy: a smaller program
BY_WEIGHTS = {
    "scale of the first attn_norm left out": engine_errors.scale_left_out("attn_norm", 0),
    "bias of queries left out": engine_errors.bias_left_out("q_bias"),
    "bias of values left out": engine_errors.bias_left_out("v_bias"),
    "heads rotated as pairs of neighbours": engine_errors.interleaved_rope,
}
"""Errors that need no other program."""


@functools.cache
def model() -> Any:
    """A model with biases, whose norms have scales around 1 as trained ones have."""
    weights, rng = tiny.placed_weights(mesh_of("1,1,1")), np.random.default_rng(2)
    layers = weights.layers
    biases = {
        f"{name}_bias": place(
            0.2 * rng.standard_normal(each.shape[:1] + each.shape[2:]).astype(np.float32), each.sharding
        )
        for name, each in (("q", layers.q), ("k", layers.k), ("v", layers.v))
    }
    return CONFIG, dataclasses.replace(weights, layers=dataclasses.replace(layers, **biases))


@functools.cache
def auditor() -> Auditor:
    made = Auditor(mesh_of("1,1,1"), dtype=ENGINE.dtype)
    made.prepare(model(), REQUESTS)
    return made


def audited(engine: Engine, of: Any) -> AuditResult:
    """The audit of an engine's answers; the model that it answers with may be another than that of the audit."""
    return auditor().run(model(), REQUESTS, engine.generate(of, REQUESTS))


def assert_shown(name: str, result: AuditResult) -> None:
    print(f"{name}: {result}")
    assert result.logprob_noise is not None and result.logprob_noise_mean is not None
    assert result.logprob_gap > 2 * result.logprob_noise, name
    assert result.logprob_gap_mean > 2 * result.logprob_noise_mean, name


@pytest.mark.nightly  # in make slow: test_bfloat16.py
def test_an_error_in_weights_shows_and_rounding_does_not() -> None:
    engine = Engine(ENGINE, mesh_of("1,1,1"))
    right = audited(engine, model())
    print(f"no error: {right}")
    assert right.logprob_noise is not None and right.logprob_noise_mean is not None
    assert 0 < right.logprob_gap <= 2 * right.logprob_noise
    assert 0 < right.logprob_gap_mean <= 2 * right.logprob_noise_mean
    for name, wrong in BY_WEIGHTS.items():
        assert_shown(name, audited(engine, wrong(model())))


@pytest.mark.nightly
@pytest.mark.parametrize("theta", [500000.0, 20000.0])
def test_another_rope_base_shows(theta: float) -> None:
    engine = Engine(ENGINE, mesh_of("1,1,1"))
    assert_shown(f"rope base {theta:g}", audited(engine, engine_errors.other_rope_base(theta)(model())))


@pytest.mark.slow
def test_a_page_of_another_sequence_shows() -> None:
    with engine_errors.pages_of_others():
        result = audited(Engine(ENGINE, mesh_of("1,1,1")), model())
    assert_shown("first page of another sequence", result)
