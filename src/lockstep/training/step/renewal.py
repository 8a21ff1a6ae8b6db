"""A reference model that is renewed as training goes on, kept in the state of the optimizer."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from lockstep.training.step.train_state import cast_floats


class RenewalState(NamedTuple):
    """The state of `ReferenceRenewal.transformation`: a checkpoint has it, and a train step renews it."""

    updates: Int[Array, ""]  # the number of updates so far
    reference: PyTree  # what of the reference model is trained, in the compute type


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRenewal:
    r"""When and how the reference model follows the model (TR-DPO, Gorbatovski et al. 2024,
    https://arxiv.org/abs/2404.09656, equations 2 and 3): :math:`\pi_{ref} \leftarrow \alpha\pi + (1-\alpha)\pi_{ref}`.
    """

    every: int  # the number of updates between two renewals
    mixup: float  # the equation's alpha
    dtype: jnp.dtype  # the type of the reference

    def transformation(self) -> optax.GradientTransformation:
        """Return the part of an optimizer that keeps the reference. It changes no update, and comes after all that do.

        The reference begins as the first parameters. An update that is left out (``on_nan``) does not count.
        """

        def init(parameters: PyTree) -> RenewalState:
            return RenewalState(updates=jnp.zeros((), jnp.int32), reference=cast_floats(parameters, self.dtype))

        def update(
            updates: PyTree, state: RenewalState, parameters: PyTree | None = None
        ) -> tuple[PyTree, RenewalState]:
            assert parameters is not None, "the reference follows parameters"
            count = state.updates + 1
            due = count % self.every == 0

            def renewed(old: Array, new: Array) -> Array:
                wide = self.mixup * new.astype(jnp.float32) + (1 - self.mixup) * old.astype(jnp.float32)
                return jnp.where(due, (new if self.mixup == 1 else wide).astype(old.dtype), old)

            reference = jax.tree.map(renewed, state.reference, optax.apply_updates(parameters, updates))
            return updates, RenewalState(updates=count, reference=reference)

        return optax.GradientTransformation(init, update)


def reference_of(opt_state: PyTree) -> PyTree | None:
    """Return the reference that the state of an optimizer has; None where it keeps none. Launches nothing."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, RenewalState))
    return next((part.reference for part in parts if isinstance(part, RenewalState)), None)
