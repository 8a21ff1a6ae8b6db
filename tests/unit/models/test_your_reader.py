"""The readers of docs/your-trainer.md: their models say what their own forward says, and a reader is short."""

import importlib.util
import inspect
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import lockstep
from lockstep.errors import ConfigError
from lockstep.models import read_decoder, view
from lockstep.placement import LazyWeight, mesh_of
from tests.multiprocess.launches import record_launches
from tests.tiny import requests

EXAMPLES = Path(__file__).parents[3] / "examples"
VOCAB = 64


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def greedy(forward, asked):
    """Greedy answers by the example's own forward pass."""
    answers = []
    for request in asked:
        tokens = list(request.prompt_tokens)
        while len(tokens) < len(request.prompt_tokens) + request.params.max_new_tokens:
            ids = np.zeros((1, 64), np.int32)
            ids[0, : len(tokens)] = tokens
            tokens.append(int(np.argmax(np.asarray(forward(ids))[0, len(tokens) - 1])))
            if tokens[-1] in request.params.stops:
                break
        answers.append(tuple(tokens[len(request.prompt_tokens) :]))
    return answers


def noisy(tree):
    """Every weight away from its neutral value."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    moved = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def check(model, forward):
    asked = requests(lengths=(1, 17, 33))
    with record_launches() as launches:
        _, weights = read_decoder(model)
    assert launches == [] and any(isinstance(leaf, LazyWeight) for leaf in jax.tree.leaves(weights))
    got = lockstep.Engine(lockstep.EngineConfig(), mesh_of(weights.embed)).generate(model, asked)
    assert [answer.tokens for answer in got] == greedy(jax.jit(forward), asked)


def test_a_dict_of_arrays():
    example = load("dict_loop")
    params = noisy(example.init(jax.random.key(0), VOCAB))
    check(example.read(params), lambda ids: example.forward(params, ids))
    assert len(inspect.getsource(example.read).splitlines()) < 50


def test_a_flax_model_by_its_weight_names():
    example = load("nnx_loop")
    nnx = example.nnx
    model = example.Model(VOCAB, nnx.Rngs(0))
    graph, params = nnx.split(model)
    params = noisy(params)
    check(nnx.merge(graph, params), lambda ids: nnx.merge(graph, params)(ids))
    assert len(inspect.getsource(example.read).splitlines()) + len(example.NAMES) < 50


@pytest.mark.parametrize(
    ("shape", "pattern", "picks", "text"),
    [
        ((2, 3), "a -> a", {}, "does not fit an array of shape"),
        ((2, 3), "a b -> b", {}, "every axis must be wanted or picked"),
        ((2, 3), "a b -> b a c", {}, "does not fit"),
        ((2, 3), "a layer -> layer a", {}, "the layer first"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(shape, pattern, picks, text):
    with pytest.raises(ConfigError, match=text):
        view(np.zeros(shape), pattern, **picks)


def test_layers_that_differ_are_refused():
    with pytest.raises(ConfigError, match="the layers of a weight differ"):
        view([jax.numpy.zeros((2, 3)), jax.numpy.zeros((2, 4))], "a b -> b a")
