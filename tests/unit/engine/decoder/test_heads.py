import jax.numpy as jnp

from lockstep.engine.decoder.heads import device_heads, kept_by_layer
from lockstep.models.attention import Heads
from lockstep.models.attention.kv import PagedKv
from lockstep.placement import make_decode_mesh
from tests.unit.engine.models import FAMILIES, LLAMA, mesh_of

FLOAT32 = jnp.dtype(jnp.float32)


def test_a_device_has_its_part_of_the_heads():
    for tensor in (1, 2):
        heads = device_heads(LLAMA, make_decode_mesh(mesh_of("1,1,2"), tensor))
        assert (heads.kv_heads * tensor, heads.group) == (LLAMA.num_kv_heads, LLAMA.q_heads_per_group)
        assert heads.head_size == LLAMA.head_size and heads.windows is None and heads.by_layer is None


def test_a_step_reads_the_window_of_each_layer():
    config = FAMILIES["gemma3"]
    rows = PagedKv(kv_heads=1, head_size=8)
    kept = kept_by_layer(config, Heads(kv_heads=1, group=2, head_size=8), rows)
    windows = [layer.window for layer in kept]
    assert len({*windows}) == 2 and None in windows
    read = sum(layer.step_bytes(100.5, FLOAT32) for layer in kept)
    assert read == sum(rows.position_bytes(FLOAT32) * (100.5 if window is None else window) for window in windows)
