"""A weight that is cast and moved piece by piece."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lockstep.placement import chunked_cast, place
from lockstep.placement.leaf_layout import LeafLayout
from tests.unit.placement.layouts import check_shards, decode_mesh_of, every_spec


@pytest.mark.parametrize(
    ("shape", "tensor", "dtype"),
    [
        ("1,2,2", 2, np.float32),
        ("1,4,1", 2, np.float32),
        pytest.param("1,4,1", 4, np.float32, marks=pytest.mark.nightly),
        pytest.param("4,1,1", 2, np.float32, marks=pytest.mark.nightly),
        pytest.param("1,4,1", 2, jnp.bfloat16, marks=pytest.mark.nightly),
        pytest.param("1,2,2", 2, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("1,4,1", 4, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("4,1,1", 2, jnp.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_a_large_weight_moves_in_pieces(shape: str, tensor: int, dtype: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(chunked_cast, "PIECE_BYTES", 32)
    decode_mesh, rng = decode_mesh_of(shape, tensor), np.random.default_rng(0)
    host = rng.standard_normal((16, 8), np.float32)
    host[0, 0], host[1, 1], host[2, 2] = np.inf, 1e-39, 3.4e38
    loops = 0
    for spec in every_spec(decode_mesh, 2):
        for dim in (0, 1):
            layout = LeafLayout(decode_mesh, spec, dim)
            moved = jax.jit(
                jax.shard_map(
                    lambda block, layout=layout: chunked_cast.read_by_pieces(layout, block, dtype),
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
