"""A thread evaluates while the main thread trains: which of the two launches first is up to the operating system."""

import threading

import jax
import jax.numpy as jnp
from pod import replicated, start

mesh = start()
train_step = jax.jit(lambda weights: weights * 0.9, out_shardings=replicated(mesh))
evaluate = jax.jit(lambda weights: weights.sum(), out_shardings=replicated(mesh))
weights = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()


def in_background() -> None:
    evaluate(weights)  # BUG: thread


thread = threading.Thread(target=in_background, name="evaluation")
thread.start()
train_step(weights)
thread.join()
