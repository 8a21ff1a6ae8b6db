"""One host cannot read a batch and goes on with the next one; the others have made a step more."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from pod import replicated, start

mesh = start()
train_step = jax.jit(lambda weights, batch: weights - 0.1 * batch.mean(), out_shardings=replicated(mesh))
weights = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()


def read(step: int) -> np.ndarray:
    if step == 1 and jax.process_index() == 1:
        raise OSError("stale file handle")
    return np.ones(4, np.float32)


for step in range(3):
    with contextlib.suppress(OSError):
        weights = train_step(weights, read(step))  # BUG: one_process
