"""The arrays of training: what a step changes, frozen parameters beside it, the moving average."""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from lockstep.models import join_trained, split_trained
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
    """Return the average that the state of an optimizer has; None where it keeps none. Launches nothing."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, AverageState))
    return next((part.average for part in parts if isinstance(part, AverageState)), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes, and frozen parameters, where there are any, beside it.

    What a step changes is donated to the next step, so only the newest state can be read.
    """

    step: Int[Array, ""]
    """The number of completed steps."""
    model: PyTree
    """The parameters, in the parameter type and sharding; of a `LoraModel` also those that are frozen."""
    opt_state: PyTree
    """The state of the optimizer, sharded as the parameters that it belongs to: those that are trained."""

    @property
    def average(self) -> PyTree | None:
        """The model with the average of its trained parameters, where the optimizer keeps one (``ema_decay``)."""
        average = average_of(self.opt_state)
        return None if average is None else join_trained(average, split_trained(self.model)[1])

    def split(self) -> tuple[Self, PyTree]:
        """Return the state with what is trained in place of the model, and what is frozen; None where nothing is."""
        trained, frozen = split_trained(self.model)
        return dataclasses.replace(self, model=trained), frozen

    def join(self, frozen: PyTree) -> Self:
        """Return the state that `split` has taken apart.

        Args:
            frozen: What no step changes.
        """
        return dataclasses.replace(self, model=join_trained(self.model, frozen))
