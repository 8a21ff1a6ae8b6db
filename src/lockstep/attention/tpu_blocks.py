"""Block sizes of the TPU attention kernel: how much K/V and how many queries it holds in VMEM at a time.

Too large and the kernel does not compile; too small and it copies in dribs and drabs. What compiles is known only to
the compiler, so the sizes are a table (`tpu_block_table`) that ``scripts/make_tpu_blocks.py`` makes by compiling.
"""

import dataclasses
import functools
import logging
import re

from lockstep.attention.tpu_block_table import BLOCKS, PAGE_SIZES, VMEM_LIMIT

logger = logging.getLogger(__name__)

LANES = 128
"""Numbers in a vector register's row: a smaller head is stored in so many, a larger one the kernel does not take."""

_SAFE_TOKENS, _SAFE_QUERIES = 128, 8
_SAFE_ROWS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sizes for one kind of launch.

    Args:
        pages: of K/V that are fetched at a time.
        queries: query tokens that are attended at a time.
        vmem_limit: bytes of VMEM that the kernel may use.
        known: whether the sizes come from the table, and so are known to compile; else from a rule.
    """

    pages: int
    queries: int
    vmem_limit: int
    known: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockKey:
    """What block sizes depend on.

    Args:
        generation: of the TPU: ``v4``, ``v5e``, ``v5p``, ``v6e``.
        q_heads: of a device, those of padded kv heads included.
        kv_heads: of a device, as stored.
        head_size: as stored.
        page_size: tokens in a page.
        dtype: of queries and pool.
    """

    generation: str
    q_heads: int
    kv_heads: int
    head_size: int
    page_size: int
    dtype: str

    @property
    def heads(self) -> tuple[int, int, int, str]:
        """The part of the key that the table of a generation is made for."""
        return self.q_heads, self.kv_heads, self.head_size, self.dtype


def blocks_for(key: BlockKey) -> tuple[Blocks, Blocks]:
    """Block sizes for decode and for prefill; what is not in the table gets small ones by `safe`, and a warning."""
    limit = VMEM_LIMIT.get(key.generation, min(VMEM_LIMIT.values()))
    blocks = BLOCKS.get(key.generation, {}) if key.page_size in PAGE_SIZES else {}
    found = next((sizes for sizes, heads in blocks.items() if key.heads in heads), None)
    if found is None:
        _warn(key)
        return safe(key), safe(key)
    decode, prefill = (
        Blocks(pages=positions // key.page_size, queries=queries, vmem_limit=limit, known=True)
        for positions, queries in found
    )
    return decode, prefill


def safe(key: BlockKey) -> Blocks:
    """Small sizes for heads outside the table: 128 positions, and 512 rows of queries of all heads, at most 8 tokens.

    What the kernel keeps then is below 4 MiB for 128 heads of 128 float32 numbers, a quarter of what the smallest
    generation lets a kernel have unless told otherwise; compiled for every generation by the tests.
    """
    return Blocks(
        pages=max(1, _SAFE_TOKENS // key.page_size),
        queries=max(1, min(_SAFE_QUERIES, _SAFE_ROWS // key.q_heads)),
        vmem_limit=VMEM_LIMIT.get(key.generation, min(VMEM_LIMIT.values())),
        known=False,
    )


def stored_heads(kv_heads: int, itemsize: int) -> int:
    """The least number of kv heads, from ``kv_heads`` on, whose K and V together fill the kernel's tiles.

    A tile holds ``4 / itemsize`` numbers per 32-bit word, and 1, 2, 4 or a multiple of 8 words.
    """
    packing = 4 // itemsize
    count = kv_heads
    while (2 * count) % packing or not ((words := 2 * count // packing) in (1, 2, 4) or words % 8 == 0):
        count += 1
    return count


def takes(q_heads: int, kv_heads: int, itemsize: int) -> bool:
    """Whether the kernel can cut the query heads as it cuts the kv heads.

    It takes kv heads by the tile (``16 / itemsize`` of them) where they are whole tiles, and their query heads must
    then be a multiple of 8, or all there are. In 16 bits they always are.
    """
    tile = 16 // itemsize
    if kv_heads % tile:
        return True
    part = tile * (q_heads // kv_heads)
    return part == q_heads or part % 8 == 0


def stored_head_size(head_size: int) -> int:
    """The head size, rounded up to whole rows of `LANES` numbers."""
    return -(-head_size // LANES) * LANES


def generation(device_kind: str) -> str:
    """The TPU generation in a ``device_kind``: ``v5p`` for ``TPU v5``, ``v5e`` for ``TPU v5 lite``."""
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
        key.dtype,
        key.page_size,
        key.generation,
    )
