"""The dtype that a Tunix model computes in."""

from typing import Any

import jax.numpy as jnp


def compute_dtype(model: Any) -> str | None:
    """Return the name of the dtype; None for that of the parameters, where the model's configuration has none.

    Args:
        model: The model.
    """
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return None if dtype is None else jnp.dtype(dtype).name
