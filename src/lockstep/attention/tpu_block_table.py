"""Made by scripts/make_tpu_blocks.py, which says how; do not edit."""

type Block = tuple[int, int]
type Heads = tuple[int, int, int, str]

# fmt: off
VMEM_LIMIT: dict[str, int] = {'v4': 14680064, 'v5e': 100663296, 'v5p': 50331648, 'v6e': 100663296}
"""Bytes of VMEM that the kernel may use, by TPU generation."""

PAGE_SIZES = (16, 32, 64, 128)
"""Tokens in a page; every block below compiles with each of them."""

BLOCKS: dict[str, dict[tuple[Block, Block], list[Heads]]] = (
{'v4': {((512, 8), (1024, 8)): [(64, 8, 128, 'bfloat16')],
        ((512, 8), (1024, 32)): [(1, 1, 128, 'bfloat16'), (1, 1, 128, 'float32'), (2, 1, 128, 'bfloat16'),
                                 (2, 1, 128, 'float32'), (2, 2, 128, 'bfloat16'), (3, 1, 128, 'bfloat16'),
                                 (4, 1, 128, 'bfloat16'), (4, 1, 128, 'float32'), (4, 2, 128, 'bfloat16'),
                                 (4, 4, 128, 'bfloat16'), (5, 1, 128, 'bfloat16'), (6, 1, 128, 'bfloat16'),
                                 (6, 2, 128, 'bfloat16'), (7, 1, 128, 'bfloat16'), (8, 1, 128, 'bfloat16'),
                                 (8, 1, 128, 'float32'), (8, 2, 128, 'bfloat16'), (8, 2, 128, 'float32'),
                                 (8, 4, 128, 'bfloat16'), (8, 8, 128, 'bfloat16'), (10, 2, 128, 'bfloat16'),
                                 (12, 2, 128, 'bfloat16'), (12, 4, 128, 'bfloat16'), (14, 2, 128, 'bfloat16'),
                                 (16, 2, 128, 'bfloat16'), (16, 2, 128, 'float32'), (16, 4, 128, 'bfloat16'),
                                 (16, 4, 128, 'float32'), (16, 8, 128, 'bfloat16'), (16, 16, 128, 'bfloat16'),
                                 (20, 4, 128, 'bfloat16'), (24, 8, 128, 'bfloat16'), (28, 4, 128, 'bfloat16'),
                                 (32, 4, 128, 'bfloat16'), (32, 8, 128, 'bfloat16'), (32, 8, 128, 'float32'),
                                 (32, 32, 128, 'bfloat16'), (40, 8, 128, 'bfloat16')]},
 'v5e': {((512, 8), (1024, 32)): [(1, 1, 128, 'bfloat16'), (1, 1, 128, 'float32'), (2, 1, 128, 'bfloat16'),
                                  (2, 1, 128, 'float32'), (2, 2, 128, 'bfloat16'), (3, 1, 128, 'bfloat16'),
                                  (4, 1, 128, 'bfloat16'), (4, 1, 128, 'float32'), (4, 2, 128, 'bfloat16'),
                                  (4, 4, 128, 'bfloat16'), (5, 1, 128, 'bfloat16'), (6, 1, 128, 'bfloat16'),
                                  (6, 2, 128, 'bfloat16'), (7, 1, 128, 'bfloat16'), (8, 1, 128, 'bfloat16'),
                                  (8, 1, 128, 'float32'), (8, 2, 128, 'bfloat16'), (8, 2, 128, 'float32'),
                                  (8, 4, 128, 'bfloat16'), (8, 8, 128, 'bfloat16'), (10, 2, 128, 'bfloat16'),
                                  (12, 2, 128, 'bfloat16'), (12, 4, 128, 'bfloat16'), (14, 2, 128, 'bfloat16'),
                                  (16, 2, 128, 'bfloat16'), (16, 2, 128, 'float32'), (16, 4, 128, 'bfloat16'),
                                  (16, 4, 128, 'float32'), (16, 8, 128, 'bfloat16'), (16, 16, 128, 'bfloat16'),
                                  (20, 4, 128, 'bfloat16'), (24, 8, 128, 'bfloat16'), (28, 4, 128, 'bfloat16'),
                                  (32, 4, 128, 'bfloat16'), (32, 8, 128, 'bfloat16'), (32, 8, 128, 'float32'),
                                  (32, 32, 128, 'bfloat16'), (40, 8, 128, 'bfloat16'), (64, 8, 128, 'bfloat16')]},
 'v5p': {((512, 8), (1024, 32)): [(1, 1, 128, 'bfloat16'), (1, 1, 128, 'float32'), (2, 1, 128, 'bfloat16'),
                                  (2, 1, 128, 'float32'), (2, 2, 128, 'bfloat16'), (2, 2, 128, 'float32'),
                                  (3, 1, 128, 'bfloat16'), (3, 1, 128, 'float32'), (4, 1, 128, 'bfloat16'),
                                  (4, 1, 128, 'float32'), (4, 2, 128, 'bfloat16'), (4, 2, 128, 'float32'),
                                  (4, 4, 128, 'bfloat16'), (4, 4, 128, 'float32'), (5, 1, 128, 'bfloat16'),
                                  (5, 1, 128, 'float32'), (6, 1, 128, 'bfloat16'), (6, 1, 128, 'float32'),
                                  (6, 2, 128, 'bfloat16'), (6, 2, 128, 'float32'), (7, 1, 128, 'bfloat16'),
                                  (7, 1, 128, 'float32'), (8, 1, 128, 'bfloat16'), (8, 1, 128, 'float32'),
                                  (8, 2, 128, 'bfloat16'), (8, 2, 128, 'float32'), (8, 4, 128, 'bfloat16'),
                                  (8, 4, 128, 'float32'), (8, 8, 128, 'bfloat16'), (10, 2, 128, 'bfloat16'),
                                  (10, 2, 128, 'float32'), (12, 2, 128, 'bfloat16'), (12, 2, 128, 'float32'),
                                  (12, 4, 128, 'bfloat16'), (12, 4, 128, 'float32'), (14, 2, 128, 'bfloat16'),
                                  (14, 2, 128, 'float32'), (16, 2, 128, 'bfloat16'), (16, 2, 128, 'float32'),
                                  (16, 4, 128, 'bfloat16'), (16, 4, 128, 'float32'), (16, 8, 128, 'bfloat16'),
                                  (16, 8, 128, 'float32'), (16, 16, 128, 'bfloat16'), (20, 4, 128, 'bfloat16'),
                                  (20, 4, 128, 'float32'), (24, 8, 128, 'bfloat16'), (24, 8, 128, 'float32'),
                                  (28, 4, 128, 'bfloat16'), (28, 4, 128, 'float32'), (32, 4, 128, 'bfloat16'),
                                  (32, 4, 128, 'float32'), (32, 8, 128, 'bfloat16'), (32, 8, 128, 'float32'),
                                  (32, 32, 128, 'bfloat16'), (40, 8, 128, 'bfloat16'), (40, 8, 128, 'float32'),
                                  (64, 8, 128, 'bfloat16'), (64, 8, 128, 'float32')]},
 'v6e': {((512, 8), (1024, 32)): [(1, 1, 128, 'bfloat16'), (1, 1, 128, 'float32'), (2, 1, 128, 'bfloat16'),
                                  (2, 1, 128, 'float32'), (2, 2, 128, 'bfloat16'), (3, 1, 128, 'bfloat16'),
                                  (4, 1, 128, 'bfloat16'), (4, 1, 128, 'float32'), (4, 2, 128, 'bfloat16'),
                                  (4, 4, 128, 'bfloat16'), (5, 1, 128, 'bfloat16'), (6, 1, 128, 'bfloat16'),
                                  (6, 2, 128, 'bfloat16'), (7, 1, 128, 'bfloat16'), (8, 1, 128, 'bfloat16'),
                                  (8, 1, 128, 'float32'), (8, 2, 128, 'bfloat16'), (8, 2, 128, 'float32'),
                                  (8, 4, 128, 'bfloat16'), (8, 8, 128, 'bfloat16'), (10, 2, 128, 'bfloat16'),
                                  (12, 2, 128, 'bfloat16'), (12, 4, 128, 'bfloat16'), (14, 2, 128, 'bfloat16'),
                                  (16, 2, 128, 'bfloat16'), (16, 2, 128, 'float32'), (16, 4, 128, 'bfloat16'),
                                  (16, 4, 128, 'float32'), (16, 8, 128, 'bfloat16'), (16, 16, 128, 'bfloat16'),
                                  (20, 4, 128, 'bfloat16'), (24, 8, 128, 'bfloat16'), (28, 4, 128, 'bfloat16'),
                                  (32, 4, 128, 'bfloat16'), (32, 8, 128, 'bfloat16'), (32, 8, 128, 'float32'),
                                  (32, 32, 128, 'bfloat16'), (40, 8, 128, 'bfloat16'), (64, 8, 128, 'bfloat16')]}}
)
# fmt: on
"""By generation, then blocks of decode and of prefill as (positions of K/V, queries): the heads they are
for, as (query heads, kv heads, head size, dtype)."""
