"""Process 0 alone prints a norm: one line of debugging, and a program that the other processes never launch."""

import jax
import jax.numpy as jnp
from pod import start

start()
weights = jnp.arange(8.0)
for step in range(3):
    weights = weights * 0.9
    if jax.process_index() == 0:
        print("step", step, "norm", float(jnp.linalg.norm(weights)))  # BUG: one_process
