"""Block sizes, and heads as the kernel takes them."""

from typing import Any

import pytest

from lockstep.models.attention import tpu_blocks
from lockstep.models.attention.tpu_block_table import VMEM_LIMIT
from lockstep.models.attention.tpu_blocks import (
    BlockKey,
    blocks_for,
    max_table_rows,
    safe,
    stored_head_size,
    stored_heads,
    takes,
    tpu_generation,
)
from lockstep.placement.device import FP8


@pytest.mark.parametrize(("itemsize", "wants"), [(4, {1: 1, 3: 4, 5: 8}), (2, {1: 1, 3: 4, 6: 8, 12: 16}), (1, {1: 2})])
def test_stored_heads(itemsize: int, wants: dict[int, int]) -> None:
    assert {kv_heads: stored_heads(kv_heads, itemsize) for kv_heads in wants} == wants


@pytest.mark.parametrize(
    ("kind", "generation"),
    [
        ("TPU v4", "v4"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v5 lite", "v5e"),
        ("TPU7x", "tpu7x"),
        ("TPU8t", "tpu8t"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("CPU", "cpu"),
    ],
)
def test_the_generation_follows_from_the_kind(kind: str, generation: str) -> None:
    assert tpu_generation(kind) == generation


@pytest.mark.parametrize(("size", "stored"), [(1, 128), (64, 128), (128, 128), (129, 256)])
def test_a_head_fills_whole_rows_of_lanes(size: int, stored: int) -> None:
    assert stored_head_size(size) == stored


@pytest.mark.parametrize(("pages", "rows"), [(1, 1536), (128, 1536), (129, 768), (1024, 192), (2048, 96), (1 << 18, 0)])
def test_rows_of_a_page_table_in_three_quarters_of_scalar_memory(pages: int, rows: int) -> None:
    assert max_table_rows(pages) == rows


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "itemsize", "works"),
    [(8, 8, 4, False), (16, 8, 4, True), (4, 4, 4, True), (6, 3, 4, True), (8, 8, 2, True), (40, 8, 4, False)],
)
def test_query_heads_of_a_tile_are_a_multiple_of_8_or_all(
    q_heads: int, kv_heads: int, itemsize: int, works: bool
) -> None:
    assert takes(q_heads, kv_heads, itemsize) == works


def key_of(**values: Any) -> BlockKey:
    given = {"generation": "v5p", "q_heads": 32, "kv_heads": 8, "head_size": 128, "page_size": 64, "dtype": "bfloat16"}
    return BlockKey(**{"kv_dtype": values.get("dtype", "bfloat16"), **given, **values})


def test_heads_of_the_table_get_its_blocks_in_pages() -> None:
    decode, prefill = blocks_for(key_of())
    assert (decode.pages, decode.queries, decode.known) == (512 // 64, 8, True)
    assert (prefill.pages, prefill.queries, prefill.known) == (1024 // 64, 32, True)
    assert decode.vmem_limit == VMEM_LIMIT["v5p"]


@pytest.mark.parametrize("generation", ["v5p", "v6e"])
def test_heads_over_a_pool_in_8_bits_have_blocks_of_their_own(generation: str) -> None:
    for q_heads, kv_heads in [(32, 8), (8, 2), (64, 8), (16, 2), (28, 4)]:
        key = key_of(generation=generation, q_heads=q_heads, kv_heads=kv_heads, kv_dtype=FP8.name)
        assert all(blocks.known for blocks in blocks_for(key)), key
    odd = key_of(generation=generation, q_heads=32, kv_heads=8, dtype="float32", kv_dtype=FP8.name)
    assert not blocks_for(odd)[0].known, "in float32 nothing was compiled"


@pytest.mark.parametrize("change", [{"q_heads": 31}, {"page_size": 24}, {"generation": "v9"}, {"dtype": "float16"}])
def test_what_the_table_lacks_gets_small_blocks_and_a_warning(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of(**change)
    tpu_blocks._warn.cache_clear()
    decode, prefill = blocks_for(key)
    assert decode == prefill == safe(key) and not decode.known
    assert "no block sizes for" in caplog.text


def test_small_blocks_shrink_with_many_query_heads_and_large_pages() -> None:
    assert (safe(key_of(q_heads=32)).queries, safe(key_of(q_heads=128)).queries) == (8, 4)
    assert (safe(key_of(q_heads=1024)).queries, safe(key_of(page_size=256)).pages) == (1, 1)
    assert safe(key_of(generation="v9")).vmem_limit == min(VMEM_LIMIT.values())
