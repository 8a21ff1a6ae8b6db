"""The choice of attention, by the devices of the mesh."""

import jax
import jax.numpy as jnp
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig
from lockstep.models.attention.training import CausalAttention, HeadArrays, self_attention
from lockstep.models.attention.training.backend import attention_products
from lockstep.placement import make_mesh

LENGTH = 1024


def traced(backend, mesh=None):
    """The jaxpr of attention over one row, as text."""
    q = jax.ShapeDtypeStruct((1, LENGTH, 1, 2, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((1, LENGTH, 1, 8), jnp.float32)

    def attend(q, k, v):
        return self_attention(HeadArrays(q, k, v), CausalAttention(scale=1.0), backend=backend)

    with jax.set_mesh(mesh) if mesh is not None else jax.default_device(None):
        return str(jax.make_jaxpr(attend)(q, k, k))


def all_scores(jaxpr):
    return f"{LENGTH},{LENGTH}]" in jaxpr


@pytest.mark.parametrize("backend", ["default", "jax_flash"])
def test_without_tpus_it_is_blockwise(backend):
    for mesh in (None, make_mesh("1,-1,1")):
        jaxpr = traced(backend, mesh)
        assert "scan" in jaxpr and not all_scores(jaxpr)


def test_vanilla_has_all_scores():
    assert all_scores(traced("vanilla"))


def test_the_kernel_is_refused_without_tpus():
    with pytest.raises(ConfigError, match=r"attn_backend is splash.*no mesh is set\. Use default"):
        traced("splash")
    with pytest.raises(ConfigError, match=r"attn_backend is splash.*platform 'cpu'\. Use default, which is jax_flash"):
        traced("splash", make_mesh("1,-1,1"))


def test_tpus_that_can_only_be_compiled_for_get_the_kernel():
    mesh = jax.sharding.AbstractMesh(
        (1, 4, 1), ("dp", "fsdp", "tp"), abstract_device=jax.sharding.AbstractDevice("TPU v5p", 1, "tpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = traced("default")
    assert "pallas_call" in jaxpr and not all_scores(jaxpr)


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(
        ConfigError, match="attn_backend is 'nvte'; it must be one of default, splash, jax_flash, vanil"
    ):
        LlamaConfig(attn_backend="nvte")


def test_products_are_those_of_the_blocks_that_are_computed():
    assert attention_products("vanilla", 2048, None, forwards=1) == 2048 * 6
    assert attention_products("jax_flash", 2048, None, forwards=2) == 2048 * 10
    # Blocks of 512: a query looks at 1, 2, 3 or 4 of them, and at its own and one more with a window of 512.
    assert attention_products("default", 2048, None, forwards=1) == 2.5 * 512 * 9
    assert attention_products("splash", 2048, 512, forwards=1) == 2 * 512 * 9
