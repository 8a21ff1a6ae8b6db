"""Made by scripts/make_tpu_blocks.py; do not edit."""

VMEM_LIMIT: dict[str, int] = {"v4": 16 << 20, "v5e": 100 << 20, "v5p": 64 << 20, "v6e": 100 << 20}

BLOCKS: dict[str, dict[tuple[int, int, int, str], dict[int, tuple[tuple[int, int], tuple[int, int]]]]] = {}
