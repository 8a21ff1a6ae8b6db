"""The files of process 0 have one batch more than those of the others, and each evaluates what it has."""

import jax
import jax.numpy as jnp
from pod import replicated, start

mesh = start()
evaluate = jax.jit(lambda total, batch: total + batch, out_shardings=replicated(mesh))
total = jax.jit(lambda: jnp.zeros(()), out_shardings=replicated(mesh))()
batches = iter([1.0] * (3 if jax.process_index() == 0 else 2))
for batch in batches:
    total = evaluate(total, batch)  # BUG: one_process
