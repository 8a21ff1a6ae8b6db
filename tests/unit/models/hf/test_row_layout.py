"""Rows of stored tensors on their way to devices and back."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.hosts import Ledger
from lockstep.models import as_trainable
from lockstep.models.hf.names import HFTensor
from lockstep.models.hf.row_layout import RowGather, RowLayout
from lockstep.models.hf.saved_tensor import saved_tensors
from lockstep.placement import make_mesh, place, place_argument
from lockstep.placement.device import compile_program
from tests import tiny

SIZES = {"layer": 2, "embed": 8, "kv_head": 4, "q_heads_per_group": 3, "head_size": 2}
HEADS = ("kv_head", "q_heads_per_group", "head_size")
FSDP_AND_TP = {"embed": ("fsdp",), "kv_head": ("tp",)}
MAPPINGS: list[dict[str, tuple[str, ...]]] = [
    {},
    FSDP_AND_TP,
    {"embed": ("dp", "fsdp")},
    {"kv_head": ("tp", "fsdp")},
    {"embed": ("tp",), "layer": ("fsdp",)},
    {"kv_head": ("fsdp",), "head_size": ("tp",)},
]


def layout_of(shape: str, dims: Any, order: tuple[str, ...], mapping: dict[str, tuple[str, ...]]) -> RowLayout:
    mesh = make_mesh(shape, jax.devices()[:4])
    axes = tuple((name, SIZES[name]) for name in order)
    return RowLayout(mesh=mesh, dims=dims, axes=axes, split=tuple(mapping.get(name, ()) for name in order))


def device_rows(layout: RowLayout) -> dict[jax.Device, tuple[int, int]]:
    indices = layout.sharding.devices_indices_map(layout.shape)
    return {device: layout.rows(*index[1].indices(layout.shape[1])[:2]) for device, index in indices.items()}


@pytest.mark.parametrize("shape", ["1,4,1", "1,2,2", "2,2,1", "1,1,4", "4,1,1"])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_devices_read_every_row_once(shape: str, mapping: dict[str, tuple[str, ...]]) -> None:
    for dims in [(HEADS, ("embed",)), (("embed",), HEADS), (("embed",),), (("q_heads_per_group",),)]:
        order = tuple(name for name in SIZES if name in {"layer", *itertools.chain(*dims)})
        layout = layout_of(shape, dims, order, mapping)
        stored = HFTensor("", dims).shape(SIZES)
        read = sorted(row for start, stop in device_rows(layout).values() for row in range(start, stop))
        assert read == list(range(stored[0]))


@pytest.mark.parametrize(("shape", "mapping"), [*zip(["1,2,2"] * 6, MAPPINGS, strict=True), ("2,2,1", FSDP_AND_TP)])
def test_moved_rows_are_the_parameter(shape: str, mapping: dict[str, tuple[str, ...]]) -> None:
    for dims in [(HEADS, ("embed",)), (("embed",), HEADS)]:
        layout = layout_of(shape, dims, tuple(SIZES), mapping)
        stored_shape = (SIZES["layer"], *HFTensor("", dims).shape(SIZES))
        stored = np.arange(np.prod(stored_shape), dtype=np.float32).reshape(stored_shape)

        def rows_of(index: Any, layout: RowLayout = layout, stored: np.ndarray = stored) -> np.ndarray:
            first, last, _ = index[1].indices(layout.shape[1])
            start, stop = layout.rows(first, last)
            block = np.full((stored.shape[0], last - first, *stored.shape[2:]), np.nan, np.float32)
            block[:, : stop - start] = stored[:, start:stop]
            return block

        rows = jax.make_array_from_callback(layout.shape, layout.sharding, rows_of)
        moved = jax.jit(layout.move, out_shardings=layout.target)(rows)
        sizes = [SIZES["layer"], *(SIZES[name] for group in dims for name in group)]
        flat = ["layer", *itertools.chain(*dims)]
        expected = stored.reshape(sizes).transpose([flat.index(name) for name in SIZES])
        np.testing.assert_array_equal(moved, expected)
        assert moved.sharding.is_equivalent_to(layout.target, moved.ndim)


def test_columns_are_exchanged_without_a_copy_of_the_whole_on_a_device() -> None:
    layout = layout_of("1,4,1", (HEADS, ("embed",)), tuple(SIZES), FSDP_AND_TP)
    rows = jax.ShapeDtypeStruct(layout.shape, np.float32, sharding=layout.sharding)
    text = jax.jit(layout.move, out_shardings=layout.target).lower(rows).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text


VOCAB = 12


def model(mesh_shape):
    return as_trainable(tiny.CONFIG, tiny.placed_weights(make_mesh(mesh_shape, jax.devices()[:4]), vocab=VOCAB))


def gathered(tensor, most_bytes):
    """All pieces of a tensor, put together; and the program."""
    gather = RowGather.of(tensor, most_bytes)
    where = jax.ShapeDtypeStruct((2,), np.int32, sharding=gather.replicated)
    array = tensor.parameter.value.array
    program = compile_program("gather_rows", gather.gather, [array, where], mesh=gather.mesh, ledger=Ledger())
    pieces = []
    for start, stop in tensor.pieces(most_bytes):
        rows = program(array, place_argument(np.array([tensor.layer or 0, start], np.int32), gather.replicated))
        kept = rows.shape[0] * (stop - start) // gather.count
        assert all(np.array_equal(rows.addressable_data(0), shard.data) for shard in rows.addressable_shards)
        pieces.append(np.asarray(rows)[:kept])
    return np.concatenate(pieces), program


def expected(tensor):
    array = np.asarray(tensor.parameter.value.array)
    return tensor.to_stored(array if tensor.layer is None else array[tensor.layer])


NAMES = (
    "embed_tokens",
    "layers.1.self_attn.q_proj",
    "layers.1.self_attn.o_proj",
    "layers.1.mlp.down_proj",
    "1.input_layernorm",
)


@pytest.mark.parametrize("mesh_shape", ["1,2,2", "2,1,2"])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_that_cross_the_shards_are_the_stored_tensor(mesh_shape, name):
    (tensor,) = [each for each in saved_tensors(model(mesh_shape), None, VOCAB) if name in each.name]
    most = 5 * tensor.nbytes // tensor.rows  # five rows, which no shard's size is a multiple of
    np.testing.assert_array_equal(gathered(tensor, most)[0], expected(tensor))


def test_layers_on_different_devices_are_gathered_too():
    mesh = make_mesh("1,2,2", jax.devices()[:4])
    some = model("1,2,2")
    moved = jax.tree.map(
        lambda leaf: place(np.asarray(leaf), NamedSharding(mesh, PartitionSpec("fsdp"))) if leaf.ndim == 3 else leaf,
        some,
    )
    (tensor,) = [each for each in saved_tensors(moved, None, VOCAB) if "layers.1.mlp.gate" in each.name]
    np.testing.assert_array_equal(gathered(tensor, tensor.nbytes)[0], expected(tensor))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_bit_survives(dtype):
    some = jax.tree.map(lambda leaf: place(np.full(leaf.shape, -0.0, np.float32), leaf.sharding), model("1,2,2"))
    tensor = saved_tensors(some, dtype, VOCAB)[0]
    values, _ = gathered(tensor, tensor.nbytes)
    assert values.dtype == dtype and np.signbit(values.astype(np.float32)).all()


def test_a_device_holds_a_few_pieces_however_large_the_tensor_is():
    mesh = make_mesh("1,2,2", jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("tp", "fsdp"))
    large = jax.tree.map(lambda leaf: leaf, model("1,2,2"))
    vocab = 1 << 16
    struct = jax.ShapeDtypeStruct((vocab, tiny.CONFIG.hidden_dim), np.float32, sharding=sharding)
    axes = (large.embed.axes[0].resize(vocab), large.embed.axes[1])
    (tensor, *_) = [each for each in saved_tensors(large, None, VOCAB) if each.name == "model.embed_tokens.weight"]
    parameter = dataclasses.replace(tensor.parameter, value=_Named(struct, axes))
    tensor = type(tensor)(parameter=parameter, layer=None, dtype=tensor.dtype, vocab_size=vocab)
    piece = 64 << 10
    gather = RowGather.of(tensor, piece)
    where = jax.ShapeDtypeStruct((2,), np.int32, sharding=gather.replicated)
    program = compile_program("gather_rows", gather.gather, [struct, where], mesh=mesh, ledger=Ledger())
    need = program.memory()
    assert tensor.nbytes == 128 * piece
    assert need.output_size_in_bytes == piece and need.temp_size_in_bytes <= 6 * piece


class _Named:
    """As much of a named array as is looked at."""

    def __init__(self, array, axes):
        self.array, self.axes, self.ndim = array, axes, len(axes)
