"""A seed, a learning rate and a constant that each process has from itself, where all should have the same."""

import jax
import jax.numpy as jnp
import numpy as np
from pod import replicated, start

mesh = start()
own = jax.process_index()
noise = np.random.default_rng(own).normal(size=8).astype(np.float32)
jax.make_array_from_callback(noise.shape, replicated(mesh), lambda index: noise[index])  # BUG: values

weights = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()
train_step = jax.jit(lambda weights, rate: weights * rate, out_shardings=replicated(mesh))
rate = np.float32(0.1 + own)
weights = train_step(weights, rate)  # BUG: values

temperature = 0.5 + own
scale = jax.jit(lambda weights: weights / temperature, out_shardings=replicated(mesh))
scale(weights)  # BUG: values
