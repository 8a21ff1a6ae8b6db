"""Block sizes of the TPU attention kernel: how much K/V and how many queries it keeps in VMEM at a time.

If they are too large the kernel does not compile; if they are too small its copies cannot hide their latency. Only the
compiler knows what compiles, so the sizes are a table (`tpu_block_table`) that ``scripts/make_tpu_blocks.py`` makes by
compiling.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

from jaxtyping import Array, Int

from lockstep.models.attention.tpu_block_table import BLOCKS, PAGE_SIZES, VMEM_LIMIT
from lockstep.printable import get_logger

logger = get_logger(__name__)

LANES = 128
"""Elements in a row of a vector register: a smaller head is padded to it, a larger one the kernel does not take."""

_TABLE_BYTES = 3 << 18
"""Bytes of scalar memory that a page table may take: of 1 MiB, which the compiler has on every generation, a quarter is
left to the rest of the program. An index has 4 bytes, and a row is padded to whole rows of `LANES` of them."""

_SAFE_TOKENS, _SAFE_QUERIES = 128, 8
_SAFE_ROWS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The block sizes of one kind of launch.

    Args:
        pages: The number of pages of K/V that the kernel fetches at a time.
        queries: The number of query tokens that it computes at a time.
        known: Whether the sizes come from the table, and so are known to compile; else from the rule of `safe`.
    """

    pages: int
    queries: int
    vmem_limit: int
    known: bool


class Rows(NamedTuple):
    """The rows of a launch as the kernel's sequences: consecutive rows of one prompt are one sequence."""

    lengths: Int[Array, " row"]
    page_table: Int[Array, "row page"]
    q_starts: Int[Array, " row_and_one"]
    num_sequences: Int[Array, " one"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockKey:
    """The key of block sizes.

    Args:
        generation: The TPU generation: ``v4``, ``v5e``, ``v5p``, ``v6e`` or ``tpu7x``.
        q_heads: The number of query heads of a device, those of padded kv heads included.
        head_size: The stored head size in elements.
        dtype: The name of the dtype of the queries.
        kv_dtype: The name of the dtype of the pool.
    """

    generation: str
    q_heads: int
    kv_heads: int
    head_size: int
    page_size: int
    dtype: str
    kv_dtype: str

    @property
    def heads(self) -> tuple[int, int, int, str]:
        """The heads and dtypes by which the table of a generation is looked up."""
        dtypes = self.dtype if self.kv_dtype == self.dtype else f"{self.dtype}, K/V {self.kv_dtype}"
        return self.q_heads, self.kv_heads, self.head_size, dtypes


def blocks_for(key: BlockKey) -> tuple[Blocks, Blocks]:
    """Return the block sizes of decode and of prefill; heads outside the table get `safe` ones and a warning."""
    limit = VMEM_LIMIT.get(key.generation, min(VMEM_LIMIT.values()))
    blocks = BLOCKS.get(key.generation, {}) if key.page_size in PAGE_SIZES else {}
    q_heads, kv_heads, size, dtypes = key.heads
    sizes = next(
        (entry for entry, heads in blocks.items() if (q_heads, kv_heads) in heads.get((size, dtypes), ())), None
    )
    if sizes is None:
        _warn(key)
        return safe(key), safe(key)
    decode, prefill = (
        Blocks(pages=positions // key.page_size, queries=queries, vmem_limit=limit, known=True)
        for positions, queries in sizes
    )
    return decode, prefill


def safe(key: BlockKey) -> Blocks:
    """Return small sizes for heads outside the table: 128 positions, and 8 query tokens or 512 rows of all heads.

    The kernel then keeps less than 4 MiB for 128 heads of 128 float32 elements, a quarter of the default limit of the
    smallest generation. The tests compile them for every generation.
    """
    return Blocks(
        pages=max(1, _SAFE_TOKENS // key.page_size),
        queries=max(1, min(_SAFE_QUERIES, _SAFE_ROWS // key.q_heads)),
        vmem_limit=VMEM_LIMIT.get(key.generation, min(VMEM_LIMIT.values())),
        known=False,
    )


def stored_heads(kv_heads: int, itemsize: int) -> int:
    """Return the least number of kv heads, at least ``kv_heads``, whose K and V together fill the kernel's tiles.

    A tile has 1, 2, 4 or a multiple of 8 words of 32 bits, each of ``4 / itemsize`` elements.

    Args:
        kv_heads: The number of kv heads of a device, as the model has them.
    """
    packing = 4 // itemsize
    count = kv_heads
    while (2 * count) % packing or not ((words := 2 * count // packing) in (1, 2, 4) or words % 8 == 0):
        count += 1
    return count


def max_table_rows(pages: int) -> int:
    """Return the most rows that a page table in scalar memory may have."""
    return _TABLE_BYTES // (4 * -(-pages // LANES) * LANES)


def takes(q_heads: int, kv_heads: int, itemsize: int) -> bool:
    """Whether the kernel can split the query heads as it splits the kv heads.

    Where the kv heads are whole tiles (``16 / itemsize`` of them each) the kernel takes a tile at a time. The query
    heads of a tile must then be a multiple of 8, or all query heads. In 16 and 8 bits they always are.

    Args:
        q_heads: The number of query heads of a device, those of padded kv heads included.
    """
    tile = 16 // itemsize
    if kv_heads % tile:
        return True
    part = tile * (q_heads // kv_heads)
    return part == q_heads or part % 8 == 0


def stored_head_size(head_size: int) -> int:
    """Return the head size in elements, rounded up to whole rows of `LANES`."""
    return -(-head_size // LANES) * LANES


def tpu_generation(device_kind: str) -> str:
    """Return the TPU generation of a ``device_kind``: ``v5e`` for ``TPU v5 lite``, ``tpu7x`` for ``TPU7x``."""
    kind = device_kind.lower()
    match = re.search(r"v(\d+)\s*(lite|e|p)?", kind)
    if match is None:
        return kind
    number, flavour = match.groups()
    if flavour in ("lite", "e"):
        return f"v{number}e"
    return f"v{number}p" if flavour == "p" or number == "5" else f"v{number}"


@functools.cache
def _warn(key: BlockKey) -> None:
    logger.warning(
        "the TPU attention kernel has no block sizes for %d query heads and %d kv heads of size %d in %s, pages of %d "
        "tokens, on TPU %s; small ones are used, which are safe and may be slow. Add the heads to "
        "scripts/make_tpu_blocks.py and run it, or choose another page_size or layout.",
        key.q_heads,
        key.kv_heads,
        key.head_size,
        key.heads[-1],
        key.page_size,
        key.generation,
    )
