"""Where the launcher is, and the environment that tests give it."""

import os
from pathlib import Path

from tests.isolation import COMPILED_FAST

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = REPOSITORY / "infra" / "launch.py"
STARTUP = Path(__file__).resolve().parent / "startup"
"""Has the module that each process of a job imports at its start."""
CACHE = REPOSITORY / "build" / "jax-cache"


OPTIMISED = {"XLA_FLAGS": "--xla_backend_optimization_level=3"}
"""Variables with which a job compiles as it does for a user."""


def cache_environment() -> dict[str, str]:
    """Variables with which processes share compiled programs on disk, and compile them fast rather than well.

    Most of such a test's time goes to compiling programs that then run for milliseconds.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    fast = "" if "xla_backend_optimization_level" in flags else f" {COMPILED_FAST}"
    path = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": flags + fast,
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
