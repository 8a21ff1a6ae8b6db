"""Every process evaluates when it finds the time for it: on a slow host more than a second has passed."""

import time

import jax
import jax.numpy as jnp
from pod import replicated, start

mesh = start()
evaluate = jax.jit(lambda weights: weights.sum(), out_shardings=replicated(mesh))
weights = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()
began = time.monotonic()
time.sleep(1.5 * (jax.process_index() == 1))  # a slow disk
if time.monotonic() - began > 1.0:
    evaluate(weights)  # BUG: one_process
