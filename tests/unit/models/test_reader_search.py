"""Every guess changes the settings, says what it changes, and is made only where it can be."""

import dataclasses

import jax
import numpy as np
import pytest

from lockstep.models import RotaryConfig, Variant, read_decoder
from lockstep.models.adjustable import settings_of
from lockstep.models.reader_search import suspects
from tests.tiny import numpy_weights
from tests.unit.engine.models import FAMILIES, model_on
from tests.unit.models.test_check_reader import CONFIG, LINEAR


def texts(config, **shapes):
    return dict(suspects(config, numpy_weights(config, **shapes)))


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant(norm_plus_one=True, embed_scale=4.0, logit_soft_cap=30.0, sliding_window=8),
        Variant(
            sliding_window=8, layer_types=("sliding_attention", "full_attention"), sliding_rope=RotaryConfig(theta=1e4)
        ),
        Variant(sliding_window=8, full_attention_every=2, sliding_rope=RotaryConfig(theta=5e5)),
        Variant(interleaved_rope=True),
        *(FAMILIES["latent"], FAMILIES["sinks"], LINEAR),
    ],
)
def test_each_is_another_setting_and_has_a_text_of_its_own(variant):
    config = variant
    if isinstance(variant, Variant):
        config = dataclasses.replace(CONFIG, head_dim=16, rope=RotaryConfig(theta=5e5), variant=variant)
    weights = read_decoder(model_on("1,1,1", config))[1] if config is variant else numpy_weights(config)
    every = list(suspects(config, weights))
    assert len({text for text, _ in every}) == len(every) > 30
    base = settings_of(config)
    for text, settings in every:
        assert not same(settings, base), text
        shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(each)] for each in (settings, base)]
        assert shapes[0] == shapes[1], text


def test_what_cannot_be_is_not_tried():
    text = "the layers are ordered by the text of their number: 10 before 2"
    assert text not in texts(CONFIG)
    (order,) = [s["layers"] for t, s in texts(dataclasses.replace(CONFIG, num_layers=12)).items() if t == text]
    read = sorted(range(12), key=str)  # what such a reader took for layers 0, 1, 2 ...
    assert [read[i] for i in order] == list(range(12))
    many = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=4)
    assert not any("query head i" in each for each in texts(many))
    assert "k is transposed" in texts(many) and "k is transposed" not in texts(CONFIG)
    none = dataclasses.replace(numpy_weights(CONFIG), lm_head=None)
    assert not any("lm_head" in each for each, _ in suspects(CONFIG, none))
