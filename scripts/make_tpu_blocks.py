"""Writes src/lockstep/attention/tpu_block_table.py: block sizes of the TPU attention kernel that are known to compile.

    JAX_PLATFORMS=cpu .venv/bin/python scripts/make_tpu_blocks.py [--only v5p]

For each TPU generation, heads, dtype and page size it compiles the kernel with the TPU compiler (no TPU is needed), the
wanted sizes first, and keeps the first that compile. Wanted is, in order: enough K/V per copy to hide its latency, and
little enough not to fetch much beyond the end of a sequence, since the kernel fetches whole blocks; for decode few
queries, because each sequence has one and the rest of a block is computed for nothing; for prefill what jax's own table
has for blocks of this kind (``tuned_block_sizes.py``, measured on v5e and v6e: mostly 1024 positions, 32 queries).
Nothing here was measured on a TPU by us.
"""

import argparse
import itertools
import os
import pprint
import sys
import time
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.attention.tpu_blocks import stored_head_size, stored_heads, takes
from lockstep.plan.topology import topology

TABLE = Path(__file__).parents[1] / "src" / "lockstep" / "attention" / "tpu_block_table.py"

TOPOLOGIES = {"v4": "v4-8", "v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4"}
# Bytes that a kernel may use. VMEM has 32 MiB on v4 (16 per core), 128 on v5e and v6e, 64 per core on v5p
# (https://jax-ml.github.io/scaling-book/tpus/); a part is left to the compiler for what runs beside the kernel.
VMEM_LIMIT = {"v4": 14 << 20, "v5e": 96 << 20, "v5p": 48 << 20, "v6e": 96 << 20}

# Query heads, kv heads and head size of models, and the numbers of devices that share them.
MODELS = {
    "Llama-3.1-8B, Mistral-7B, Qwen3-8B": (32, 8, 128),
    "Llama-3.1-70B, Qwen2.5-72B": (64, 8, 128),
    "Llama-3.2-3B": (24, 8, 128),
    "Llama-3.2-1B": (32, 8, 64),
    "Llama-2-7B": (32, 32, 128),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen2.5-1.5B": (12, 2, 128),
    "Qwen2.5-3B": (16, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen2.5-14B, 32B": (40, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "Phi-3-mini": (32, 32, 96),
}
PAGE_SIZES = (16, 32, 64, 128)
# Who decodes in float32 tries things out.
DTYPES = {"bfloat16": list(MODELS.values()), "float32": [(32, 8, 128), (16, 2, 128)]}

DECODE = list(itertools.product((512, 256, 128), (8, 4, 2, 1)))
PREFILL = list(itertools.product((1024, 512, 256, 128), (32, 16, 8)))
TOKENS, SEQUENCES, POSITIONS = 512, 64, 4096

type Block = tuple[int, int]
type Heads = tuple[int, int, int, str]


def heads() -> list[Heads]:
    """Query heads, kv heads and head size as a device stores them, and the dtype."""
    found = set()
    shapes = [(dtype, *model) for dtype, models in DTYPES.items() for model in models]
    for dtype, q_heads, kv_heads, size in shapes:
        for tensor in (1, 2, 4, 8, 16):
            # Beyond its kv heads a model's heads are replicated and its groups split.
            kv, q = max(1, kv_heads // tensor), -(-q_heads // tensor)
            stored = stored_heads(kv, jnp.dtype(dtype).itemsize)
            if not takes(q // kv * stored, stored, jnp.dtype(dtype).itemsize):
                continue
            found.add((q // kv * stored, stored, stored_head_size(size), dtype))
    return sorted(found)


def compiles(device: jax.Device, key: Heads, page_size: int, pages: int, queries: int, limit: int) -> str:
    """Empty, or why not."""
    q_heads, kv_heads, head_size, dtype = key
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))

    def struct(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    arguments = (
        struct(TOKENS, q_heads, head_size, dtype=dtype),
        struct(1024, page_size, 2 * kv_heads, head_size, dtype=dtype),
        struct(SEQUENCES),
        struct(SEQUENCES, POSITIONS // page_size),
        struct(SEQUENCES + 1),
        struct(1),
    )

    def attend(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arrays, num_kv_pages_per_block=pages, num_queries_per_block=queries, vmem_limit_bytes=limit
        )

    try:
        with jax.set_mesh(mesh):
            jax.jit(attend).lower(*arguments).compile()
    except Exception as error:
        return str(error).replace("\n", " ")
    return ""


def first(device: jax.Device, key: Heads, candidates: list[Block], limit: int) -> Block | None:
    """Positions and queries of the first candidate that compiles with every page size."""
    for tokens, queries in candidates:
        for page_size in PAGE_SIZES:
            why = compiles(device, key, page_size, tokens // page_size, queries, limit)
            if why:
                print(f"    {key} pages of {page_size}: {tokens} positions, {queries} queries: {why[:160]}", flush=True)
                break
        else:
            return tokens, queries
    return None


def write(blocks: dict[str, dict[tuple[Block, Block], list[Heads]]]) -> None:
    """The table as a module."""
    text = (
        '"""Made by scripts/make_tpu_blocks.py, which says how; do not edit."""\n\n'
        "type Block = tuple[int, int]\n"
        "type Heads = tuple[int, int, int, str]\n\n"
        "# fmt: off\n"
        f"VMEM_LIMIT: dict[str, int] = {VMEM_LIMIT!r}\n"
        '"""Bytes of VMEM that the kernel may use, by TPU generation."""\n\n'
        f"PAGE_SIZES = {PAGE_SIZES!r}\n"
        '"""Tokens in a page; every block below compiles with each of them."""\n\n'
        "BLOCKS: dict[str, dict[tuple[Block, Block], list[Heads]]] = (\n"
        f"{pprint.pformat(blocks, width=118, compact=True)}\n)\n"
        "# fmt: on\n"
        '"""By generation, then blocks of decode and of prefill as (positions of K/V, queries): the heads they are\n'
        'for, as (query heads, kv heads, head size, dtype)."""\n'
    )
    written = TABLE.with_suffix(".new")
    written.write_text(text, encoding="utf-8")
    written.rename(TABLE)


def main() -> None:
    """Compiles and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TOPOLOGIES, help="make this generation anew and keep the others")
    only = parser.parse_args().only
    blocks: dict[str, dict[tuple[Block, Block], list[Heads]]] = {}
    if only:
        from lockstep.attention.tpu_block_table import BLOCKS

        blocks = dict(BLOCKS)
    for name in [only] if only else TOPOLOGIES:
        device = topology(TOPOLOGIES[name]).devices[0]
        start, blocks[name] = time.time(), {}
        for key in heads():
            decode = first(device, key, DECODE, VMEM_LIMIT[name])
            prefill = first(device, key, PREFILL, VMEM_LIMIT[name])
            if decode and prefill:
                blocks[name].setdefault((decode, prefill), []).append(key)
            else:
                print(f"  {name} {key}: NOTHING compiles", flush=True)
        known = sum(map(len, blocks[name].values()))
        print(f"{name}: {known} heads in {time.time() - start:.0f} s", flush=True)
    write(blocks)


if __name__ == "__main__":
    sys.exit(main())
