"""What training has on the devices: all that a step changes, and what it does not."""

import dataclasses
from typing import Self

import jax
from jaxtyping import Array, Int, PyTree

from lockstep.models import join_trained, split_trained
from lockstep.training.step.averaging import average_of


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
