"""The forward pass with adjustable settings is, with those of the configuration, the trainable model."""

import haliax as hax
import jax
import numpy as np
import pytest

from lockstep.models import read_decoder
from lockstep.models.adjustable import adjustable_logits, settings_of
from tests.unit.engine.models import FAMILIES, VOCAB, model_on
from tests.unit.models.test_check_reader import LINEAR

IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 24)).astype(np.int32)
IN_SLOW = ("gemma", "olmo", "gemma3", "apertus", "latent", "linear")
MODELS = FAMILIES | {"linear": LINEAR}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in IN_SLOW)) for name in MODELS]
)
def test_it_is_the_trainable_model(name):
    model = model_on("1,1,1", MODELS[name])
    config, weights = read_decoder(model)
    theirs = jax.jit(lambda m: m(hax.named(IDS, ("batch", "position"))).array)(model)
    ours = jax.jit(adjustable_logits, static_argnums=0)(config, weights, IDS, settings_of(config))
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)
