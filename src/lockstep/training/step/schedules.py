"""Learning-rate schedules: a warm-up, then a shape by name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike

from lockstep.errors import ConfigError
from lockstep.plugins import load_object

TIMESCALE: Final = 10_000  # the number of steps of warm-up and decay after which `inv_sqrt` begins to fall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decay:
    """The arguments of a shape."""

    peak: float  # the learning rate before the decay
    min_ratio: float  # the one after it, as a fraction of that
    steps: int  # number of steps of the decay, at least 1
    warmup: int

    @property
    def last(self) -> float:
        """The learning rate after the decay."""
        return self.peak * self.min_ratio


type Shape = Callable[[Decay], optax.Schedule]
"""Makes a function from the number of completed steps of the decay to the learning rate."""


def _wsd(decay: Decay) -> optax.Schedule:
    """Fall with 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392, equation 1)."""

    def falling(step: ArrayLike) -> Array:
        return decay.peak - (decay.peak - decay.last) * jnp.sqrt(jnp.clip(jnp.asarray(step) / decay.steps, 0.0, 1.0))

    return falling


def _inv_sqrt(decay: Decay) -> optax.Schedule:
    """Stay until warm-up and decay have had `TIMESCALE` steps and fall with the root of these from there on (Vaswani et
    al. 2017, arXiv 1706.03762, section 5.3, with another number in the place of the warm-up), as Levanter's does. Where
    the decay is all that is left after the warm-up, they are the steps of the run.
    """

    def falling(step: ArrayLike) -> Array:
        steps = jnp.maximum(jnp.asarray(step) + decay.warmup, TIMESCALE)
        return jnp.maximum(decay.peak * jnp.sqrt(TIMESCALE / steps), decay.last)

    return falling


SHAPES: Final[Mapping[str, Shape]] = {
    "cosine": lambda decay: optax.cosine_decay_schedule(decay.peak, decay.steps, decay.min_ratio),
    "linear": lambda decay: optax.linear_schedule(decay.peak, decay.last, decay.steps),
    "constant": lambda decay: optax.constant_schedule(decay.peak),
    "wsd": _wsd,
    "inv_sqrt": _inv_sqrt,
}
"""The shapes by name; one of a user's own is ``module:name``."""

SHARES: Final[Mapping[str, float]] = {"wsd": 0.2}
"""The share of a run that the decay takes where it is not given (``wsd``: Hägele et al., section 4); all others take
everything after the warm-up.
"""


def check_shape(name: str) -> None:
    """Check the name of a shape; a module of the user's is not imported."""
    if name not in SHAPES and ":" not in name:
        raise ConfigError(
            f"optimizer.lr_schedule is {name!r}; it must be {', '.join(SHAPES)}, or module:function for your own."
        )


def build_schedule(shape: str, *, peak: float, min_ratio: float, warmup: int, decay: int, total: int) -> optax.Schedule:
    """Build a schedule: a function from the number of completed steps to the learning rate of the next.

    Args:
        shape: Its name in `SHAPES`, or ``module:function`` of a `Shape`.
        min_ratio: The smallest one after the warm-up, as a fraction of the peak.
        decay: The number of steps of the decay, the last ones; before it the rate stays at the peak.

    Raises:
        ConfigError: The module of a user's own shape cannot be imported, or has no such function.
    """
    make: Shape = SHAPES[shape] if shape in SHAPES else load_object(shape, "optimizer.lr_schedule")
    rising = optax.linear_schedule(0.0, peak, max(warmup, 1))
    falling = optax.constant_schedule(peak)
    if decay:
        falling = make(Decay(peak=peak, min_ratio=min_ratio, steps=decay, warmup=warmup))
    return optax.join_schedules([rising, optax.constant_schedule(peak), falling], [warmup, total - decay])
