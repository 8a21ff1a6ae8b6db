"""Merged weights on the mesh of training."""

import jax
import numpy as np
import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import LoraConfig
from lockstep.models.lora_merge import _program, merge_adapters
from tests.adapters import numpy_merged, with_adapters
from tests.unit.engine.models import model_on

LORA = LoraConfig(r=3, alpha=6.0, target_modules=("k_proj", "down_proj"))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_with_adapters_are_merged_and_others_are_the_very_same(dtype):
    hosts = Hosts(MemoryClient.hub(1)[0])
    model = with_adapters(model_on("1,2,2"), LORA)
    before = _program.cache_info().misses
    found = merge_adapters(model, hosts, dtype)
    assert _program.cache_info().misses == before + 2
    layer, old = found.layers.stacked, model.base.layers.stacked
    for name, own in (("k_proj", layer.attention.k), ("down_proj", layer.mlp.down)):
        assert own.array.dtype == (dtype or "float32") and own.axes == model.weight(name).axes
        assert own.array.sharding.is_equivalent_to(model.weight(name).array.sharding, own.array.ndim)
        expected = numpy_merged(model)[name].astype(np.float32).astype(own.array.dtype)
        tolerance = 1e-5 if dtype is None else 2**-7
        np.testing.assert_allclose(
            np.asarray(own.array, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
        )
    assert layer.attention.q.array is old.attention.q.array and found.embed.array is model.base.embed.array
    assert jax.tree.structure(found) == jax.tree.structure(model.base)
    merge_adapters(with_adapters(model.base, LORA, seed=1), hosts, dtype)
    assert _program.cache_info().misses == before + 2, "compiled once"
