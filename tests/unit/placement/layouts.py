"""Weights and layouts on four devices, and what each device must have of them."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement import make_mesh, place
from lockstep.placement.decode_mesh import DecodeMesh, make_decode_mesh
from lockstep.placement.leaf_layout import LeafLayout
from tests import tiny

CONFIG = LlamaConfig(
    max_seq_len=64, hidden_dim=8, intermediate_dim=8, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=2
)


def decode_mesh_of(shape: str, tensor: int) -> DecodeMesh:
    return make_decode_mesh(make_mesh(shape, jax.devices()[:4]), tensor)


def every_spec(decode_mesh: DecodeMesh, dims: int) -> list[tuple[tuple[str, ...], ...]]:
    """Every way to lay an array of some dimensions over the decode mesh's axes, several axes on a dimension too."""
    axes = decode_mesh.mesh.axis_names
    specs = []
    for order in itertools.permutations(axes):
        for homes in itertools.product(range(dims + 1), repeat=len(axes)):
            on = [tuple(axis for axis, home in zip(order, homes, strict=True) if home == dim) for dim in range(dims)]
            specs.append(tuple(on))
    return sorted(set(specs))


def check_shards(resharded: jax.Array, original: np.ndarray, layout: LeafLayout) -> None:
    """Every device holds its part of the original, zeros where the vocabulary is padded."""
    dim, tensor = layout.tensor_dim, layout.decode_mesh.tensor
    padding = [(0, -size % tensor if d == dim else 0) for d, size in enumerate(original.shape)]
    padded = np.pad(original, padding)
    assert resharded.shape == padded.shape
    want = PartitionSpec(*(layout.decode_mesh.tensor_axes or None if d == dim else None for d in range(original.ndim)))
    assert resharded.sharding.is_equivalent_to(NamedSharding(layout.decode_mesh.mesh, want), original.ndim)
    for shard in resharded.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), padded[shard.index], err_msg=str(layout.spec))


def weights_on(shape: str, vocab: int, **layer_specs: Any) -> tuple[DecoderWeights, DecoderWeights, Any]:
    """The same weights as NumPy arrays and as the trainer lays them; its mesh."""
    mesh = make_mesh(shape, jax.devices()[:4])
    host = tiny.numpy_weights(config=CONFIG, vocab=vocab)
    placed = tiny.placed_weights(mesh, config=CONFIG, vocab=vocab)
    changed = {name: place(getattr(host.layers, name), NamedSharding(mesh, spec)) for name, spec in layer_specs.items()}
    return host, dataclasses.replace(placed, layers=dataclasses.replace(placed.layers, **changed)), mesh
