"""What layers differ in, and that a model whose layers are the same is compiled as one that says nothing of layers."""

import dataclasses

import haliax as hax
import jax
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.models import LayerKind, RotaryConfig, Variant, distinct, layer_kinds
from tests.unit.engine.models import LLAMA, mesh_of, mixed_requests, model_on

SLIDING, FULL = "sliding_attention", "full_attention"


def with_variant(**fields):
    return dataclasses.replace(LLAMA, variant=Variant(**fields))


def test_without_types_all_layers_are_alike():
    assert layer_kinds(LLAMA) == (LayerKind(window=None, rope=LLAMA.rope),) * 2
    assert layer_kinds(with_variant(sliding_window=3)) == (LayerKind(window=3, rope=LLAMA.rope),) * 2


def test_sliding_layers_have_the_window_and_their_own_base():
    local = RotaryConfig(theta=100.0)
    config = with_variant(sliding_window=3, layer_types=(FULL, SLIDING), sliding_rope=local)
    assert layer_kinds(config) == (LayerKind(window=None, rope=config.rope), LayerKind(window=3, rope=local))
    config = with_variant(sliding_window=3, layer_types=(FULL, SLIDING))
    assert [kind.rope for kind in layer_kinds(config)] == [config.rope] * 2


def test_distinct_values_in_the_order_of_their_first():
    assert distinct("abcab") == (("a", "b", "c"), (0, 1, 2, 0, 1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(LLAMA, with_variant(layer_types=(FULL, FULL)), id="full", marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(with_variant(sliding_window=3), rope=RotaryConfig(theta=7.0)),
            with_variant(sliding_window=3, layer_types=(SLIDING,) * 2, sliding_rope=RotaryConfig(theta=7.0)),
            id="sliding",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_that_are_alike_are_compiled_as_without_types(one, other):
    def digests(config):
        engine = Engine(EngineConfig(layout={"tensor": 2}), mesh_of("1,2,2"))
        engine.prepare(model_on("1,2,2", config), mixed_requests())
        return {name: program.digest for name, program in engine.programs.items()}

    assert digests(one) == digests(other)


def test_training_of_layers_that_are_alike_is_lowered_as_without_types():
    ids = np.zeros((2, 8), np.int32)

    def text(config):
        def total(model):
            return model(hax.named(ids, ("batch", "position"))).array.sum()

        return jax.jit(jax.grad(total)).lower(model_on("1,1,1", config)).as_text()

    plain = text(LLAMA)
    assert text(with_variant(layer_types=(FULL, FULL))) == plain
    assert text(with_variant(sliding_window=3, layer_types=(FULL, SLIDING))) != plain
