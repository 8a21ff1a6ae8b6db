"""The environment of programs and tokens: versions, flags, and the source of this package."""

import functools
import hashlib
import importlib.metadata
import os
from pathlib import Path

import jax

FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
DISTRIBUTIONS = ("jax", "jaxlib", "libtpu", "numpy", "transformers", "tokenizers")
"""Packages whose versions must be equal: of what compiles, draws random rows, and finds tokens and stop strings."""
OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
"""Settings of JAX that change what is compiled."""
_PER_PROCESS_FLAGS = ("--xla_dump", "--xla_gpu_dump")
"""Beginnings of flags that may differ between processes, such as a directory for dumps, and change no program."""


def environment() -> dict[str, str]:
    """Return all that must be the same on every host for its programs and its tokens to be the same.

    Returns:
        By name, short texts and a digest of our source. Each flag of ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` has an
        entry of its own, so that an error can name the one that differs.
    """
    return {**_versions_and_source(), **_flags(), **_options()}


@functools.cache
def _versions_and_source() -> dict[str, str]:
    """Return what cannot change while the process lives."""
    total = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        total.update(f"{path.relative_to(package).as_posix()} {path.stat().st_size}\n".encode())
        total.update(path.read_bytes())
    return {**{f"{name} version": _version(name) for name in DISTRIBUTIONS}, "code of lockstep": total.hexdigest()}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _flags() -> dict[str, str]:
    found = {}
    for variable in FLAG_VARIABLES:
        for flag in os.environ.get(variable, "").split():
            name, _, value = flag.partition("=")
            if not name.startswith(_PER_PROCESS_FLAGS):
                found[f"{variable} {name}"] = value or "set"
    return found


def _options() -> dict[str, str]:
    return {f"compile option {name}": str(getattr(jax.config, name)) for name in OPTIONS if hasattr(jax.config, name)}
