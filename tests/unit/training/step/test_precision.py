"""Float types as jmp writes them."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training import parse_precision
from lockstep.training.step.precision import cast_floats


@pytest.mark.parametrize(
    ("policy", "param", "compute"),
    [
        ("f32", "float32", "float32"),
        ("bf16", "bfloat16", "bfloat16"),
        ("p=f32,c=bf16", "float32", "bfloat16"),
        ("compute=half, params=full", "float32", "float16"),
        ("p=bf16", "bfloat16", "bfloat16"),
        ("c=bf16", "float32", "bfloat16"),
    ],
)
def test_a_policy_names_both_types(policy, param, compute):
    found = parse_precision(policy)
    assert (found.param.name, found.compute.name) == (param, compute)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("int8", "mp is 'int8': 'int8' is not a known float type"),
        ("p=f32,c=", "'' is not a known float type"),
        ("p=f32,o=bf16", "'o=bf16' is not one of p= and c=, each once"),
        ("p=f32,params=bf16", "'params=bf16' is not one of p= and c=, each once"),
    ],
)
def test_what_is_not_a_policy_is_refused_with_the_types(policy, text):
    with pytest.raises(ConfigError, match=f"{text}.*types: f32, float32"):
        parse_precision(policy)


def test_only_floats_are_cast():
    tree = {"weight": np.ones(2, np.float32), "token": np.ones(2, np.int32), "mask": np.ones(2, bool)}
    cast = cast_floats(tree, jnp.dtype(jnp.bfloat16))
    assert {name: leaf.dtype.name for name, leaf in cast.items()} == {
        "weight": "bfloat16",
        "token": "int32",
        "mask": "bool",
    }


def test_parameters_and_arithmetic_have_types_of_their_own():
    precision = parse_precision("p=f32,c=bf16")
    weight = np.ones(2, np.float16)
    assert precision.cast_to_compute(weight).dtype == jnp.bfloat16
    assert precision.cast_to_param(weight).dtype == np.float32
