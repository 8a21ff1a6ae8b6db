"""Block sizes, and heads as the kernel takes them."""

import pytest

from lockstep.attention.tpu_blocks import stored_heads


@pytest.mark.parametrize(("itemsize", "wants"), [(4, {1: 1, 3: 4, 5: 8}), (2, {1: 1, 3: 4, 6: 8, 12: 16}), (1, {1: 2})])
def test_stored_heads(itemsize: int, wants: dict[int, int]) -> None:
    assert {kv_heads: stored_heads(kv_heads, itemsize) for kv_heads in wants} == wants
