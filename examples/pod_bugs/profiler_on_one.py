"""A second pass, for the profiler, is guarded by what is true on process 0 alone: maxdiffusion, issue 435."""

import jax
import jax.numpy as jnp
from pod import replicated, start

mesh = start()
denoise = jax.jit(lambda latents: latents * 0.5, out_shardings=replicated(mesh))
noise = jax.jit(lambda: jnp.ones(8), out_shardings=replicated(mesh))()


def generate() -> None:
    latents = noise
    for _ in range(2):
        latents = denoise(latents)  # BUG: one_process


def has_profiler() -> bool:
    return jax.process_index() == 0


generate()
if has_profiler():
    with jax.profiler.TraceAnnotation("generate"):
        generate()
