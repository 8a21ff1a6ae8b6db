"""Weights that are not those of the configuration are refused by name, whatever the mistake."""

import dataclasses

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import read_decoder
from lockstep.models.weight_sizes import check_weights
from lockstep.models.weights import STACKED, WEIGHT_AXES
from tests import tiny

# No two axes of a weight have one size, so that every swap shows.
CONFIG = dataclasses.replace(
    tiny.CONFIG, hidden_dim=40, intermediate_dim=48, num_layers=3, num_heads=30, num_kv_heads=5, head_dim=8
)
WEIGHTS = tiny.numpy_weights(CONFIG, vocab=56)


def weight_of(name):
    return getattr(WEIGHTS.layers if name in STACKED else WEIGHTS, name)


NAMES = [name for name in WEIGHT_AXES if weight_of(name) is not None]


def with_weight(name, array):
    if name not in STACKED:
        return dataclasses.replace(WEIGHTS, **{name: array})
    return dataclasses.replace(WEIGHTS, layers=dataclasses.replace(WEIGHTS.layers, **{name: array}))


@pytest.mark.parametrize("joint", [(2, 1), (1, 2), (3,), (1, 1, 1)])
@pytest.mark.parametrize(("name", "first"), [("q", 2), ("o", 1)])
def test_axes_of_heads_may_be_flattened(name, first, joint):
    array = weight_of(name)
    check_weights(CONFIG, WEIGHTS)
    heads = (CONFIG.num_kv_heads, CONFIG.q_heads_per_group, CONFIG.head_size)
    ends = np.cumsum(joint)
    sizes = [int(np.prod(heads[end - count : end])) for end, count in zip(ends, joint, strict=True)]
    last = array.shape[array.ndim - (name == "o") :]
    check_weights(CONFIG, with_weight(name, array.reshape(*array.shape[:first], *sizes, *last)))


@pytest.mark.parametrize("name", NAMES)
def test_every_axis_of_every_weight_has_the_size_of_the_configuration(name):
    array = weight_of(name)
    for axis in range(array.ndim):
        smaller = with_weight(name, np.take(array, range(array.shape[axis] - 1), axis))
        refused = "lm_head" if name == "embed" and axis == 0 else name
        with pytest.raises(ConfigError, match=f"the weight {refused} has the shape"):
            check_weights(CONFIG, smaller)


@pytest.mark.parametrize("name", [name for name in NAMES if weight_of(name).ndim > 1])
def test_swapped_axes_are_named_with_the_view_that_mends_them(name):
    array = weight_of(name)
    for axis in range(array.ndim - 1):
        if name == "embed":
            continue  # the rows of an embedding are what it has
        with pytest.raises(
            ConfigError, match=f"the weight {name} has .* in another order: .*-> {WEIGHT_AXES[name][0]}"
        ):
            check_weights(CONFIG, with_weight(name, array.swapaxes(axis, axis + 1)))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_layers": 2}, r"the weight \w+ has the shape \(3, .*says \(layer 2, .*num_layers"),
        ({"num_layers": 4}, "layer 4, "),
        ({"hidden_dim": 48}, "the weight embed .*embed 48.*hidden_dim"),
        ({"intermediate_dim": 40}, "mlp 40.*intermediate_dim"),
        ({"num_heads": 5}, "the weight q .*group 1.*num_heads / num_kv_heads"),
        ({"head_dim": 4}, "head 4.*head_dim"),
        ({"qk_norm": True}, "has qk_norm = True, and its weights have no q_norm"),
        ({"qkv_bias": True}, "has qkv_bias = True, and its weights have no q_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True, and its weights have lm_head"),
    ],
)
def test_a_configuration_that_is_not_of_the_weights_is_refused_wherever_a_model_is_read(values, text):
    with pytest.raises(ConfigError, match=text):
        read_decoder((dataclasses.replace(CONFIG, **values), WEIGHTS))


@pytest.mark.parametrize(("name", "setting"), [("lm_head", "tie_word_embeddings = False"), ("attn_norm", "pre_norm")])
def test_a_weight_that_is_missing_is_named(name, setting):
    with pytest.raises(ConfigError, match=f"{setting}.*, and its weights have no {name}"):
        read_decoder((CONFIG, with_weight(name, None)))


def test_one_layer_is_not_three():
    one_layer = dataclasses.replace(CONFIG, num_layers=1)
    weights = tiny.numpy_weights(one_layer, vocab=56)
    assert read_decoder((one_layer, weights))[0] == one_layer
    with pytest.raises(ConfigError, match=r"says \(layer 3, "):
        read_decoder((CONFIG, weights))


def test_a_bias_of_a_router_that_adds_none_is_refused():
    text = "experts.scoring = None, and its weights have router_bias.*Correct experts.scoring, or read no router_bias"
    with pytest.raises(ConfigError, match=text):
        read_decoder((CONFIG, with_weight("router_bias", np.zeros((CONFIG.num_layers, 4), np.float32))))
