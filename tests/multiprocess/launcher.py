"""Where the launcher is, and the environment that tests give it."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = REPOSITORY / "infra" / "launch.py"
CACHE = REPOSITORY / "build" / "jax-cache"


def cache_environment() -> dict[str, str]:
    """Variables with which processes share compiled programs on disk."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
