"""Metrics are computed in the order of a set: of strings, whose order is another one in every process."""

import jax
import jax.numpy as jnp
from pod import replicated, start

mesh = start()


def metric(name: str, power: int):
    def compute(values):
        return (values**power).mean()

    compute.__name__ = name
    return jax.jit(compute, out_shardings=replicated(mesh))


NAMES = "loss accuracy entropy margin length recall precision norm".split()  # so many that no two orders are the same
METRICS = {name: metric(name, power) for power, name in enumerate(NAMES)}
values = jax.jit(lambda: jnp.arange(8.0), out_shardings=replicated(mesh))()
for step in range(4):
    for name in set(METRICS) | {f"loss_of_{step}"}:
        if name in METRICS:
            METRICS[name](values)  # BUG: order
