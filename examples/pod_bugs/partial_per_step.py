"""A partial is jitted at every step: another function each time, and so another compilation."""

import functools

import jax
import jax.numpy as jnp
from pod import replicated, start

mesh = start()


def train_step(weights, rate):
    return weights * rate


weights = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()
for _ in range(5):
    weights = jax.jit(functools.partial(train_step, rate=0.9), out_shardings=replicated(mesh))(weights)  # BUG: retrace
