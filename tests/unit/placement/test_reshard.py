from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.models import TENSOR_DIMS, DecoderWeights
from lockstep.placement import place, reshard
from lockstep.placement.decode_mesh import DecodeMesh, make_decode_mesh
from lockstep.placement.leaf_layout import LeafLayout, leaf_layouts
from lockstep.placement.reshard import reshard_function
from tests.unit.placement.layouts import check_shards, decode_mesh_of, every_spec, weights_on


def check_reshard(
    host: DecoderWeights, placed: DecoderWeights, decode_mesh: DecodeMesh, dtype: Any, *, gather: bool
) -> Any:
    layouts = leaf_layouts(placed, decode_mesh, TENSOR_DIMS)
    function, target = reshard_function(layouts, dtype, gather=gather)
    shardings = jax.tree.map(lambda leaf: NamedSharding(decode_mesh.mesh, leaf.partition_spec), target)
    with jax.set_mesh(decode_mesh.mesh):
        resharded = jax.jit(function, out_shardings=shardings)(placed)
    if gather:
        jax.tree.map(check_shards, resharded, jax.tree.map(lambda leaf: leaf.astype(dtype), host), target)
    return resharded


@pytest.mark.parametrize(
    ("shape", "tensor", "vocab"),
    [("1,4,1", 1, 8), ("1,4,1", 2, 8), ("1,4,1", 4, 6), ("1,2,2", 2, 8), ("2,2,1", 2, 7), ("4,1,1", 4, 5)],
)
def test_resharded_weights_are_the_original_ones(shape: str, tensor: int, vocab: int) -> None:
    host, placed, mesh = weights_on(shape, vocab)
    check_reshard(host, placed, make_decode_mesh(mesh, tensor), np.float32, gather=True)


def test_cast_to_bfloat16_before_anything_moves() -> None:
    host, placed, mesh = weights_on("1,2,2", 8)
    resharded = check_reshard(host, placed, make_decode_mesh(mesh, 2), jnp.bfloat16, gather=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(resharded)} == {jnp.dtype(jnp.bfloat16)}


def test_weights_split_by_layer() -> None:
    specs = {"q": PartitionSpec("fsdp", None, "tp"), "attn_norm": PartitionSpec(("fsdp",))}
    host, placed, mesh = weights_on("1,2,2", 8, **specs)
    check_reshard(host, placed, make_decode_mesh(mesh, 2), np.float32, gather=True)


def test_the_training_layout_casts_and_moves_nothing() -> None:
    host, placed, mesh = weights_on("1,2,2", 8)
    decode_mesh = make_decode_mesh(mesh, 1)
    resharded = check_reshard(host, placed, decode_mesh, jnp.bfloat16, gather=False)

    def check(cast: jax.Array, before: jax.Array, original: np.ndarray) -> None:
        assert cast.sharding.devices_indices_map(cast.shape) == before.sharding.devices_indices_map(cast.shape)
        np.testing.assert_array_equal(np.asarray(cast), original.astype(jnp.bfloat16))

    jax.tree.map(check, resharded, placed, host)


BITS = (pytest.mark.slow, pytest.mark.optimized)
"""XLA's older loops, of the other slow tests, take the smallest numbers of 16 bits for 0."""


@pytest.mark.parametrize(
    ("shape", "tensor", "dtype"),
    [
        ("1,2,2", 2, np.float32),
        pytest.param("1,4,1", 2, np.float32, marks=pytest.mark.slow),
        pytest.param("1,4,1", 4, np.float32, marks=pytest.mark.nightly),
        pytest.param("4,1,1", 2, np.float32, marks=pytest.mark.nightly),
        pytest.param("1,4,1", 2, jnp.bfloat16, marks=pytest.mark.nightly),
        pytest.param("1,2,2", 2, jnp.bfloat16, marks=pytest.mark.nightly),
        pytest.param("1,4,1", 4, jnp.bfloat16, marks=BITS),
        pytest.param("4,1,1", 2, jnp.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_a_large_weight_moves_in_pieces(shape: str, tensor: int, dtype: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(reshard, "PIECE_BYTES", 32)
    decode_mesh, rng = decode_mesh_of(shape, tensor), np.random.default_rng(0)
    host = rng.standard_normal((16, 8), np.float32)
    host[0, 0], host[1, 1], host[2, 2] = np.inf, 1e-39, 3.4e38
    loops = 0
    for spec in every_spec(decode_mesh, 2):
        for dim in (0, 1):
            layout = LeafLayout(decode_mesh, spec, dim)
            moved = jax.jit(
                jax.shard_map(
                    lambda block, layout=layout: reshard.read_by_pieces(layout, block, dtype),
                    mesh=decode_mesh.mesh,
                    in_specs=(layout.partition_spec,),
                    out_specs=layout.decode.partition_spec,
                    check_vma=False,
                )
            )
            placed = place(host, NamedSharding(decode_mesh.mesh, layout.partition_spec))
            loops += "while" in moved.lower(placed).as_text()
            check_shards(moved(placed), host.astype(dtype), layout)
    assert loops > 3
