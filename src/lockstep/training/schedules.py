"""Learning-rate schedules: a warm-up, then a shape by name."""

from typing import Final, Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike

type ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inv_sqrt"]

WSD_DECAY: Final = 0.2
"""The share of a run that the last phase of ``wsd`` takes where it is not given (Hägele et al., section 4)."""


def build_schedule(
    shape: ScheduleName, *, peak: float, min_ratio: float, warmup: int, decay: int, total: int
) -> optax.Schedule:
    """Build a schedule.

    Args:
        shape: ``cosine``, ``linear`` and ``wsd`` fall from the peak over the last ``decay`` steps and stay at the peak
            before them. ``wsd`` falls with 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392, equation 1). ``inv_sqrt``
            falls with the root of the number of steps from the end of the warm-up on (Vaswani et al. 2017, arXiv
            1706.03762, section 5.3). ``constant`` stays.
        peak: The largest learning rate.
        min_ratio: The smallest one after the warm-up, as a fraction of the peak.
        warmup: The number of steps of a linear warm-up.
        decay: The number of steps of the fall; ``constant`` and ``inv_sqrt`` have no use for it.
        total: The number of steps of the run.

    Returns:
        A function from the number of completed steps to the learning rate of the next.
    """
    last = peak * min_ratio
    # Step 0 of a warm-up from exactly 0 would be wasted: it starts one step in.
    rising = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    if shape == "inv_sqrt":
        start = max(warmup, 1)

        def by_root(step: ArrayLike) -> Array:
            return jnp.maximum(peak * jnp.sqrt(start / (start + jnp.maximum(step, 0))), last)

        return optax.join_schedules([rising, by_root], [warmup])
    if shape == "constant" or decay == 0:
        falling = optax.constant_schedule(peak)
    elif shape == "linear":
        falling = optax.linear_schedule(peak, last, decay)
    elif shape == "wsd":

        def falling(step: ArrayLike) -> Array:
            return peak - (peak - last) * jnp.sqrt(jnp.clip(jnp.asarray(step) / decay, 0.0, 1.0))

    else:
        falling = optax.cosine_decay_schedule(peak, decay, min_ratio)
    return optax.join_schedules([rising, optax.constant_schedule(peak), falling], [warmup, total - decay])
