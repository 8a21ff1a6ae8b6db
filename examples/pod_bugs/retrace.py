"""The last batch is smaller, and the step is compiled for it too."""

import jax
import jax.numpy as jnp
import numpy as np
from pod import replicated, start

mesh = start()


def train_step(weights, batch):
    return weights - 0.1 * batch.mean()


train_step = jax.jit(train_step, out_shardings=replicated(mesh))
weights = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()
examples = np.ones((38, 4), np.float32)
for begin in range(0, len(examples), 8):
    weights = train_step(weights, examples[begin : begin + 8])  # BUG: retrace
