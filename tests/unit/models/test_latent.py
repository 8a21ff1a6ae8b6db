"""Multi-head latent attention: two ways to compute it, and what it is not computed with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import EngineConfig
from lockstep.engine.decode_model import DecodeModels
from lockstep.errors import ConfigError
from lockstep.models import Variant, read_decoder
from lockstep.models.attention.training import CausalAttention
from lockstep.models.attention.training.causal import HeadArrays, blockwise_attention
from lockstep.models.families.deepseek_v3 import DeepseekV3Config
from lockstep.models.latent import Latent, LatentQueries, absorbed, expanded, values_of
from tests.unit.engine.models import FAMILIES, mesh_of, model_on

SIZES = Latent(kv_lora_rank=7, q_lora_rank=5, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=3)


@pytest.mark.parametrize("query_block", [4, 512])
def test_attention_to_the_latent_is_that_to_its_keys_and_values(query_block: int) -> None:
    """In blocks of queries too, whose values are narrower than they."""
    keys = jax.random.split(jax.random.key(0), 4)
    rows, heads = (2, 9), 5
    q = LatentQueries(jax.random.normal(keys[0], (*rows, heads, 6)), jax.random.normal(keys[1], (*rows, heads, 4)), 0.3)
    latent = jax.random.normal(keys[2], (*rows, SIZES.size))
    kv_b = jax.random.normal(keys[3], (7, heads, 6 + 3))

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = CausalAttention(scale=q.shape[-1] ** -0.5)
        return blockwise_attention(HeadArrays(q, k, v), scores, query_block=query_block)

    with jax.default_matmul_precision("highest"):
        by_head = attend(*expanded(q, latent, jnp.einsum("...r,rhm->...hm", latent[..., :7], kv_b)))[..., 0, :]
        attended = attend(absorbed(q, kv_b), latent[..., None, :], latent[..., None, :7])
        by_latent = values_of(attended[..., 0, :, :], kv_b[..., 6:])
    assert by_head.shape == by_latent.shape == (*rows, heads, 3)
    np.testing.assert_allclose(by_head, by_latent, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads is 2 and head_dim None. Set num_kv_heads to num_heads"),
        ({"head_dim": 8}, "a key of 192 elements .* head_dim 8. Set .* head_dim to null"),
        ({"qk_norm": True}, "qk_norm is set, which attention with a latent does not have"),
        ({"variant": Variant(attention_sinks=True)}, "variant.attention_sinks is set, which"),
    ],
)
def test_what_a_latent_is_not_computed_with_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DeepseekV3Config(**{"num_heads": 6, "num_kv_heads": 6, **fields})


@pytest.mark.parametrize(("name", "size"), [("kv_lora_rank", 0), ("q_lora_rank", 0), ("qk_rope_head_dim", 3)])
def test_a_size_that_cannot_be_is_refused(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"latent\.{name} is {size}"):
        Latent(**{name: size})


def test_devices_that_share_weights_keep_the_same_latent_or_split_its_positions() -> None:
    config = FAMILIES["latent"]
    models = DecodeModels(EngineConfig(), *read_decoder(model_on("1,2,2", config)), mesh_of("1,2,2"))
    alone, both, split = (models[layout] for layout in ({"tensor": 1}, {"tensor": 2}, {"tensor": 2, "context": 2}))
    assert alone.kv_bytes == both.kv_bytes == 2 * split.kv_bytes == config.num_layers * (12 + 4) * 4
    assert (alone.heads.group, both.heads.group, split.heads.at_own_positions.group) == (4, 2, 4)
    ways = [way for way in models.layouts if isinstance(way, dict)]
    assert any(way["tensor"] == way.get("context") == 2 for way in ways)
