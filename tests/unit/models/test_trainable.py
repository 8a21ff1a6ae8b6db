"""The trainable model over weights that the decoder reads."""

import dataclasses

import jax
import numpy as np
import pytest

from lockstep.models import LlamaConfig, as_trainable, layer_products, read_decoder
from tests.unit.engine.models import FAMILIES, LLAMA, SIZES, model_on


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "tied"])
def test_reading_and_making_trainable_undo_each_other(family):
    model = model_on("1,1,1", FAMILIES[family])
    config, weights = read_decoder(model)
    again = as_trainable(config, weights)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuarterOfMlp(LlamaConfig):
    """A model of whose MLPs a token needs a quarter."""

    def part_read(self, weight, tokens):
        return 0.25 if weight in ("gate", "up", "down") else super().part_read(weight, tokens)


def test_a_token_is_multiplied_with_the_matrices_of_its_layers():
    attention = 2 * 16 * 32 + 2 * 16 * 16
    assert layer_products(LLAMA) == 2 * (attention + 3 * 16 * 24)
    assert layer_products(FAMILIES["apertus"]) == 2 * (attention + 2 * 16 * 24), "xIELU has no gate"
    assert layer_products(QuarterOfMlp(**SIZES)) == 2 * (attention + 3 * 16 * 24 / 4)


def test_axes_of_heads_may_be_flattened():
    config, weights = read_decoder(model_on("1,1,1"))
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), weights.layers)
    again = as_trainable(config, type(weights)(**{**vars(weights), "layers": flat}))
    np.testing.assert_array_equal(again.layers.stacked.attention.q.array, weights.layers.q)
