"""The exponential moving average of the parameters, as a part of the optimizer.

So the average is sharded as the parameters, donated, checkpointed and planned like any other state of the optimizer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from lockstep.training.step.precision import cast_floats


class AverageState(NamedTuple):
    """The state of `average_parameters`."""

    average: PyTree
    """The average in float32: a narrower type would round away what a step adds."""


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Keep an average of the parameters that each step moves by ``1 - decay`` towards the new ones.

    It begins with the first parameters, and changes no update. It has to be the last part of an optimizer.

    Args:
        decay: The weight of the average before the step.

    Returns:
        An optax transformation.
    """

    def init(parameters: PyTree) -> AverageState:
        return AverageState(average=cast_floats(parameters, jnp.dtype(jnp.float32)))

    def update(updates: PyTree, state: AverageState, parameters: PyTree | None = None) -> tuple[PyTree, AverageState]:
        assert parameters is not None, "the average is of parameters"
        new = optax.apply_updates(parameters, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1.0 - decay) * p.astype(a.dtype), state.average, new)
        return updates, AverageState(average=average)

    return optax.GradientTransformation(init, update)


def average_of(opt_state: PyTree) -> PyTree | None:
    """Return the average that the state of an optimizer has; None where it keeps none. Launches nothing.

    Args:
        opt_state: The state of the optimizer.
    """
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, AverageState))
    return next((part.average for part in parts if isinstance(part, AverageState)), None)
