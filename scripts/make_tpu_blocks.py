"""Writes models/attention/tpu_block_table.py: block sizes of the TPU attention kernel that are known to compile.

    JAX_PLATFORMS=cpu .venv/bin/python scripts/make_tpu_blocks.py [--only v5p] [--missing]

For each TPU generation, heads, dtypes and page size it compiles the kernel with the TPU compiler (no TPU is needed),
the wanted sizes first, and keeps the first that compile. Wanted is, in order: enough K/V per copy to hide its latency,
and little enough not to fetch much beyond the end of a sequence, since the kernel fetches whole blocks; for decode few
queries, because each sequence has one and the rest of a block is computed for nothing; for prefill what jax's own table
has for blocks of this kind (``tuned_block_sizes.py``, measured on v5e and v6e: mostly 1024 positions, 32 queries).
Nothing here was measured on a TPU by us.
"""

import argparse
import dataclasses
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

from lockstep.models.attention.tpu_block_table import BLOCKS
from lockstep.models.attention.tpu_blocks import BlockKey, stored_head_size, stored_heads, takes
from lockstep.placement.device import FP8
from lockstep.xla import topology

TABLE = Path(__file__).parents[1] / "src" / "lockstep" / "models" / "attention" / "tpu_block_table.py"

TOPOLOGIES = {"v4": "v4-8", "v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4", "tpu7x": "tpu7x-8"}
# Bytes that a kernel may use. VMEM has 32 MiB on v4 (16 per core), 128 on v5e and v6e, 64 per core on v5p
# (https://jax-ml.github.io/scaling-book/tpus/); a part is left to the compiler for what runs beside the kernel.
VMEM_LIMIT = {"v4": 14 << 20, "v5e": 96 << 20, "v5p": 48 << 20, "v6e": 96 << 20, "tpu7x": 48 << 20}

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
# The dtypes of queries and of the pool. Who decodes in float32 tries things out.
FP8_NAME = jnp.dtype(FP8).name
DTYPES = {
    ("bfloat16", "bfloat16"): list(MODELS.values()),
    ("bfloat16", FP8_NAME): list(MODELS.values()),
    ("float32", "float32"): [(32, 8, 128), (16, 2, 128)],
}

DECODE = list(itertools.product((512, 256, 128), (8, 4, 2, 1)))
PREFILL = list(itertools.product((1024, 512, 256, 128), (32, 16, 8)))
TOKENS, SEQUENCES, POSITIONS = 512, 64, 4096

type Block = tuple[int, int]
type Heads = tuple[int, int, int, str]


def keys(generation: str) -> list[BlockKey]:
    """Query heads, kv heads and head size as a device stores them, and the dtypes, for the smallest pages."""
    found = {}
    shapes = [(*dtypes, *model) for dtypes, models in DTYPES.items() for model in models]
    for dtype, kv_dtype, q_heads, kv_heads, size in shapes:
        itemsize = jnp.dtype(kv_dtype).itemsize
        for tensor in (1, 2, 4, 8, 16):
            # Beyond its kv heads a model's heads are replicated and its groups split.
            kv, q = max(1, kv_heads // tensor), -(-q_heads // tensor)
            stored = stored_heads(kv, itemsize)
            if not takes(q // kv * stored, stored, itemsize):
                continue
            key = BlockKey(
                generation=generation,
                q_heads=q // kv * stored,
                kv_heads=stored,
                head_size=stored_head_size(size),
                page_size=PAGE_SIZES[0],
                dtype=dtype,
                kv_dtype=kv_dtype,
            )
            found[key.heads] = key
    return [found[heads] for heads in sorted(found)]


def compiles(device: jax.Device, key: BlockKey, pages: int, queries: int, limit: int) -> str:
    """Empty, or why not."""
    scale = None if key.kv_dtype == key.dtype else 1.0
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))

    def struct(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    arguments = (
        struct(TOKENS, key.q_heads, key.head_size, dtype=key.dtype),
        struct(1024, key.page_size, 2 * key.kv_heads, key.head_size, dtype=key.kv_dtype),
        struct(SEQUENCES),
        struct(SEQUENCES, POSITIONS // key.page_size),
        struct(SEQUENCES + 1),
        struct(1),
    )

    def attend(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arrays,
            k_scale=scale,
            v_scale=scale,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries,
            vmem_limit_bytes=limit,
        )

    try:
        with jax.set_mesh(mesh):
            jax.jit(attend).lower(*arguments).compile()
    except Exception as error:
        return str(error).replace("\n", " ")
    return ""


def first(device: jax.Device, key: BlockKey, candidates: list[Block], limit: int) -> Block | None:
    """Positions and queries of the first candidate that compiles with every page size."""
    for tokens, queries in candidates:
        for page_size in PAGE_SIZES:
            paged = dataclasses.replace(key, page_size=page_size)
            why = compiles(device, paged, tokens // page_size, queries, limit)
            if why:
                tried = f"pages of {page_size}: {tokens} positions, {queries} queries"
                print(f"    {key.heads} {tried}: {why[:160]}", flush=True)
                break
        else:
            return tokens, queries
    return None


def write(blocks: dict[str, dict[tuple[Block, Block], list[Heads]]]) -> None:
    """The table as a module."""
    grouped: dict[str, dict[tuple[Block, Block], dict[tuple[int, str], list[tuple[int, int]]]]] = {}
    for name, found in blocks.items():
        for sizes, heads in found.items():
            of = grouped.setdefault(name, {}).setdefault(sizes, {})
            for q_heads, kv_heads, size, dtypes in heads:
                of.setdefault((size, dtypes), []).append((q_heads, kv_heads))
    text = (
        '"""Made by scripts/make_tpu_blocks.py, which says how; do not edit."""\n\n'
        "type Block = tuple[int, int]\n"
        "type Heads = dict[tuple[int, str], list[tuple[int, int]]]\n\n"
        "# fmt: off\n"
        f"VMEM_LIMIT: dict[str, int] = {VMEM_LIMIT!r}\n"
        '"""Bytes of VMEM that the kernel may use, by TPU generation."""\n\n'
        f"PAGE_SIZES = {PAGE_SIZES!r}\n"
        '"""Tokens in a page; every block below compiles with each of them."""\n\n'
        "BLOCKS: dict[str, dict[tuple[Block, Block], Heads]] = (\n"
        f"{pprint.pformat(grouped, width=118, compact=True)}\n)\n"
        "# fmt: on\n"
        '"""By generation, then blocks of decode and of prefill as (positions of K/V, queries), then head size and\n'
        'dtype: the heads that they are for, as (query heads, kv heads)."""\n'
    )
    written = TABLE.with_suffix(".new")
    written.write_text(text, encoding="utf-8")
    written.rename(TABLE)


def main() -> None:
    """Compiles and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TOPOLOGIES, help="make this generation anew and keep the others")
    parser.add_argument("--missing", action="store_true", help="keep the entries that the table has")
    arguments = parser.parse_args()
    blocks: dict[str, dict[tuple[Block, Block], list[Heads]]] = {name: {} for name in TOPOLOGIES}
    if arguments.only or arguments.missing:
        for name, found in BLOCKS.items():
            for sizes, of in found.items():
                blocks[name][sizes] = sorted((*heads, *kind) for kind, each in of.items() for heads in each)
    for name in [arguments.only] if arguments.only else TOPOLOGIES:
        device = topology(TOPOLOGIES[name]).devices[0]
        start = time.time()
        if not arguments.missing:
            blocks[name] = {}
        known = {heads for of in blocks[name].values() for heads in of}
        for key in keys(name):
            if key.heads in known:
                continue
            decode = first(device, key, DECODE, VMEM_LIMIT[name])
            prefill = first(device, key, PREFILL, VMEM_LIMIT[name])
            if decode and prefill:
                of = blocks[name].setdefault((decode, prefill), [])
                of[:] = sorted([*of, key.heads])
                if arguments.missing:
                    write(blocks)  # an interrupted call is gone on with by the same one
            else:
                print(f"  {name} {key.heads}: NOTHING compiles", flush=True)
        print(f"{name}: {sum(map(len, blocks[name].values()))} heads in {time.time() - start:.0f} s", flush=True)
        write(blocks)


if __name__ == "__main__":
    sys.exit(main())
