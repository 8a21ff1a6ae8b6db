import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from lockstep.placement.leaf_layout import TENSOR_DIM, LeafLayout, leaf_layouts, partition_specs, read

from lockstep.errors import ConfigError
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement import chunked_cast, make_mesh, place
from lockstep.placement.decode_mesh import DecodeMesh, make_decode_mesh
from lockstep.placement.reshard import reshard_function
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


def check_shards(relaid: jax.Array, original: np.ndarray, layout: LeafLayout) -> None:
    """Every device holds its part of the original, zeros where the vocabulary is padded."""
    dim, tensor = layout.tensor_dim, layout.decode_mesh.tensor
    padding = [(0, -size % tensor if d == dim else 0) for d, size in enumerate(original.shape)]
    padded = np.pad(original, padding)
    assert relaid.shape == padded.shape
    want = PartitionSpec(*(layout.decode_mesh.tensor_axes or None if d == dim else None for d in range(original.ndim)))
    assert relaid.sharding.is_equivalent_to(NamedSharding(layout.decode_mesh.mesh, want), original.ndim)
    for shard in relaid.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), padded[shard.index], err_msg=str(layout.spec))


@pytest.mark.parametrize(("shape", "tensor"), [("1,2,2", 2), ("1,2,2", 4), ("1,4,1", 2), ("4,1,1", 1)])
def test_read_from_every_layout(shape: str, tensor: int) -> None:
    decode_mesh = decode_mesh_of(shape, tensor)
    layouts = [
        LeafLayout(decode_mesh, spec, dim)
        for spec in every_spec(decode_mesh, 2)
        for dim in (None, 0, 1)
        if not (spec[0] and spec[1] and dim is None)
    ]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((4, 8), np.float32) for _ in layouts]
    placed = [place(a, NamedSharding(decode_mesh.mesh, x.partition_spec)) for a, x in zip(arrays, layouts, strict=True)]
    moved = jax.shard_map(
        functools.partial(read, layouts),
        mesh=decode_mesh.mesh,
        in_specs=(partition_specs(layouts),),
        out_specs=partition_specs([layout.decode for layout in layouts]),
        check_vma=False,
    )
    for relaid, array, layout in zip(jax.jit(moved)(placed), arrays, layouts, strict=True):
        check_shards(relaid, array, layout)


def text_of(layout: LeafLayout, shape: tuple[int, ...]) -> str:
    moved = jax.shard_map(
        layout.read,
        mesh=layout.decode_mesh.mesh,
        in_specs=layout.partition_spec,
        out_specs=layout.decode.partition_spec,
        check_vma=False,
    )
    sharding = NamedSharding(layout.decode_mesh.mesh, layout.partition_spec)
    return jax.jit(moved).lower(jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)).as_text()


def test_which_collectives_move_a_weight() -> None:
    decode_mesh = decode_mesh_of("1,4,1", 2)
    both = decode_mesh.replica_axes + decode_mesh.tensor_axes
    swapped = text_of(LeafLayout(decode_mesh, (both, ()), 1), (8, 8))
    assert "all_to_all" in swapped and "all_gather" in swapped
    odd = text_of(LeafLayout(decode_mesh, (both, ()), 1), (8, 7))
    assert "all_to_all" not in odd, "a vocabulary of 7 cannot be swapped between 2 devices"
    here = text_of(LeafLayout(decode_mesh, ((), decode_mesh.tensor_axes), 1), (8, 8))
    assert "all_to_all" not in here and "all_gather" not in here, "it lies there already"


def weights_on(shape: str, vocab: int, **layer_specs: Any) -> tuple[DecoderWeights, DecoderWeights, Any]:
    """The same weights as NumPy arrays and as the trainer lays them; its mesh."""
    mesh = make_mesh(shape, jax.devices()[:4])
    host = tiny.numpy_weights(config=CONFIG, vocab=vocab)
    placed = tiny.placed_weights(mesh, config=CONFIG, vocab=vocab)
    changed = {name: place(getattr(host.layers, name), NamedSharding(mesh, spec)) for name, spec in layer_specs.items()}
    return host, dataclasses.replace(placed, layers=dataclasses.replace(placed.layers, **changed)), mesh


def check_relay(
    host: DecoderWeights, placed: DecoderWeights, decode_mesh: DecodeMesh, dtype: Any, *, gather: bool
) -> Any:
    layouts = leaf_layouts(placed, decode_mesh)
    function, target = reshard_function(layouts, dtype, gather=gather)
    shardings = jax.tree.map(lambda leaf: NamedSharding(decode_mesh.mesh, leaf.partition_spec), target)
    with jax.set_mesh(decode_mesh.mesh):
        relaid = jax.jit(function, out_shardings=shardings)(placed)
    if gather:
        jax.tree.map(check_shards, relaid, jax.tree.map(lambda leaf: leaf.astype(dtype), host), target)
    return relaid


@pytest.mark.parametrize(
    ("shape", "tensor", "vocab"),
    [("1,4,1", 1, 8), ("1,4,1", 2, 8), ("1,4,1", 4, 6), ("1,2,2", 2, 8), ("2,2,1", 2, 7), ("4,1,1", 4, 5)],
)
def test_relaid_weights_are_the_original_ones(shape: str, tensor: int, vocab: int) -> None:
    host, placed, mesh = weights_on(shape, vocab)
    check_relay(host, placed, make_decode_mesh(mesh, tensor), np.float32, gather=True)


def test_cast_to_bfloat16_before_anything_moves() -> None:
    host, placed, mesh = weights_on("1,2,2", 8)
    relaid = check_relay(host, placed, make_decode_mesh(mesh, 2), jnp.bfloat16, gather=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(relaid)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("shape", "tensor", "dtype"),
    [
        ("1,2,2", 2, np.float32),
        ("1,4,1", 2, np.float32),
        ("1,4,1", 4, np.float32),
        ("4,1,1", 2, np.float32),
        ("1,4,1", 2, jnp.bfloat16),
        pytest.param("1,2,2", 2, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("1,4,1", 4, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("4,1,1", 2, jnp.bfloat16, marks=pytest.mark.slow),
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


def test_weights_split_by_layer() -> None:
    specs = {"q": PartitionSpec("fsdp", None, "tp"), "attn_norm": PartitionSpec(("fsdp",))}
    host, placed, mesh = weights_on("1,2,2", 8, **specs)
    check_relay(host, placed, make_decode_mesh(mesh, 2), np.float32, gather=True)


def test_the_training_layout_casts_and_moves_nothing() -> None:
    host, placed, mesh = weights_on("1,2,2", 8)
    decode_mesh = make_decode_mesh(mesh, 1)
    relaid = check_relay(host, placed, decode_mesh, jnp.bfloat16, gather=False)

    def check(cast: jax.Array, before: jax.Array, original: np.ndarray) -> None:
        assert cast.sharding.devices_indices_map(cast.shape) == before.sharding.devices_indices_map(cast.shape)
        np.testing.assert_array_equal(np.asarray(cast), original.astype(jnp.bfloat16))

    jax.tree.map(check, relaid, placed, host)


def test_a_weight_on_other_devices_is_refused_by_its_path() -> None:
    _, placed, mesh = weights_on("1,2,2", 8)
    stray = jax.device_put(np.ones((2, 8, 8), np.float32), jax.devices()[3])
    broken = dataclasses.replace(placed, layers=dataclasses.replace(placed.layers, up=stray))
    with pytest.raises(ConfigError, match=r"the weight \.layers\.up is placed on 1 devices"):
        leaf_layouts(broken, make_decode_mesh(mesh, 2))


def test_every_weight_has_a_known_axis_or_is_small() -> None:
    # A new weight that is forgotten in TENSOR_DIM would be copied to every device and be wrong where it is split.
    layers = {field.name for field in dataclasses.fields(tiny.numpy_weights().layers)}
    outer = {field.name for field in dataclasses.fields(DecoderWeights)} - {"layers"}
    norms = {"attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "final_norm", "embed_norm", "q_norm", "k_norm"}
    scalars = {"xielu_p", "xielu_n", "xielu_beta", "xielu_eps"}
    assert (layers | outer) - set(TENSOR_DIM) == norms | scalars
