"""Learning-rate schedules: a warm-up, then a shape by name."""

from typing import Final, Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike

type ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inv_sqrt"]

WSD_DECAY: Final = 0.2
"""The share of a run that the last phase of ``wsd`` takes where it is not given (Hägele et al., section 4)."""


TIMESCALE: Final = 10_000
"""The number of steps after which ``inv_sqrt`` begins to fall."""


def build_schedule(
    shape: ScheduleName, *, peak: float, min_ratio: float, warmup: int, decay: int, total: int
) -> optax.Schedule:
    """Build a schedule.

    Args:
        shape: ``cosine``, ``linear`` and ``wsd`` fall from the peak over the last ``decay`` steps and stay at the peak
            before them. ``wsd`` falls with 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392, equation 1). ``inv_sqrt``
            stays until step `TIMESCALE` and falls with the root of the steps from there on (Vaswani et al. 2017, arXiv
            1706.03762, section 5.3, with another number in the place of the warm-up), as Levanter's does.
            ``constant`` stays.
        peak: The largest learning rate.
        min_ratio: The smallest one after the warm-up, as a fraction of the peak.
        warmup: The number of steps of a linear warm-up from 0.
        decay: The number of steps of the fall; 0 and ``constant`` stay at the peak.
        total: The number of steps of the run.

    Returns:
        A function from the number of completed steps to the learning rate of the next.
    """
    last = peak * min_ratio
    rising = optax.linear_schedule(0.0, peak, max(warmup, 1))
    if shape == "constant" or decay == 0:
        falling = optax.constant_schedule(peak)
    elif shape == "linear":
        falling = optax.linear_schedule(peak, last, decay)
    elif shape == "wsd":

        def falling(step: ArrayLike) -> Array:
            return peak - (peak - last) * jnp.sqrt(jnp.clip(jnp.asarray(step) / decay, 0.0, 1.0))

    elif shape == "inv_sqrt":

        def falling(step: ArrayLike) -> Array:
            steps = jnp.maximum(jnp.asarray(step) + warmup, TIMESCALE)
            return jnp.maximum(peak * jnp.sqrt(TIMESCALE / steps), last)

    else:
        falling = optax.cosine_decay_schedule(peak, decay, min_ratio)
    return optax.join_schedules([rising, optax.constant_schedule(peak), falling], [warmup, total - decay])
