"""Which attention a device gets."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lockstep.errors import ConfigError
from lockstep.models.attention import Heads, TpuAttention, XlaAttention
from lockstep.models.attention.select import describe_attention, has_kernel, select_attention, stored_kv_heads

HEADS = Heads(kv_heads=2, group=4, head_size=64)


@pytest.fixture(scope="module")
def tpu() -> jax.Device:
    pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")
    from lockstep.xla import topology

    return topology("v5p-8").devices[0]


def test_a_cpu_gets_plain_jax_with_the_models_own_heads() -> None:
    device = jax.devices()[0]
    attention = select_attention(device, HEADS, page_size=16, dtype=jnp.dtype("float32"))
    assert isinstance(attention, XlaAttention) and not attention.page_by_page
    stored = stored_kv_heads(device, HEADS, jnp.dtype("float32"))
    assert (stored.kv_heads, stored.head_size) == (2, 64) and not has_kernel(device, HEADS)
    assert describe_attention(device, HEADS).startswith("plain JAX")


@pytest.mark.parametrize("sinks", [False, True])
def test_a_tpu_gets_the_kernel_with_heads_padded_to_its_lanes(tpu: jax.Device, sinks: bool) -> None:
    heads = dataclasses.replace(HEADS, sinks=sinks)
    attention = select_attention(tpu, heads, page_size=16, dtype=jnp.dtype("bfloat16"))
    assert isinstance(attention, TpuAttention)
    assert (attention.stored_kv_heads.kv_heads, attention.stored_kv_heads.head_size) == (2, 128)
    assert describe_attention(tpu, HEADS) == "TPU kernel, on the KV cache itself"
    assert describe_attention(tpu, HEADS, exact=True).startswith("plain JAX, 128 keys at a time")


def test_heads_wider_than_the_kernels_get_plain_jax_page_by_page_on_a_tpu(tpu: jax.Device) -> None:
    wide = Heads(kv_heads=2, group=4, head_size=256)
    attention = select_attention(tpu, wide, page_size=16, dtype=jnp.dtype("bfloat16"))
    assert isinstance(attention, XlaAttention) and attention.page_by_page
    assert "heads of at most 128 numbers, and here are 256" in describe_attention(tpu, wide)
    latent = Heads(kv_heads=1, group=4, head_size=20, value_size=12)
    assert isinstance(select_attention(tpu, latent, page_size=16, dtype=jnp.dtype("bfloat16")), XlaAttention)
    assert "takes K and V, and here is a latent of both, of 20 numbers" in describe_attention(tpu, latent)


def test_heads_that_the_kernel_cannot_split_are_refused_with_what_works(tpu: jax.Device) -> None:
    heads = Heads(kv_heads=8, group=1, head_size=128)
    with pytest.raises(ConfigError, match=r"8 query heads and 8 kv heads .* in 32 bits, .* Set dtype to bfloat16"):
        select_attention(tpu, heads, page_size=16, dtype=jnp.dtype("float32"))
