"""Each step leaves its loss on the devices and a key in the coordination service, in the memory of process 0."""

import jax
import jax.numpy as jnp
from pod import replicated, start

from lockstep.hosts import current

mesh = start()


def train_step(weights):
    return weights * 0.9, weights.sum()


train_step = jax.jit(train_step, out_shardings=replicated(mesh))
weights = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()
losses = []
for step in range(15):
    weights, loss = train_step(weights)  # BUG: growth
    losses.append(loss)
    current().client.set(f"metrics/{jax.process_index()}/{step}", b"1.5")  # BUG: growth
