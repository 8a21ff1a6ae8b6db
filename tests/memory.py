"""The arrays that are in the memory of devices."""

import gc

import jax


def live_arrays() -> list[jax.Array]:
    """All that something still refers to, without cycles that Python has not collected yet."""
    gc.collect()
    return jax.live_arrays()
