"""Rows read by devices, and the parameter that they become, for sizes that the mesh does not divide."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from lockstep.models.hf.names import HFTensor
from lockstep.models.hf.row_layout import RowLayout
from lockstep.placement import make_mesh

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
