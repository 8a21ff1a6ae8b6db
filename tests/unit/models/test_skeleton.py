"""The trainable model over weights that the decoder reads."""

import jax
import numpy as np
import pytest

from lockstep.models import as_trainable, read_decoder
from tests.unit.engine.models import FAMILIES, model_on


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "tied"])
def test_reading_and_making_trainable_undo_each_other(family):
    model = model_on("1,1,1", FAMILIES[family])
    config, weights = read_decoder(model)
    again = as_trainable(config, weights)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_axes_of_heads_may_be_flattened():
    config, weights = read_decoder(model_on("1,1,1"))
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), weights.layers)
    again = as_trainable(config, type(weights)(**{**vars(weights), "layers": flat}))
    np.testing.assert_array_equal(again.layers.stacked.attention.q.array, weights.layers.q)
