"""Parameters gathered for their use inside a step, and their gradients scattered again (FSDP)."""

import functools
from typing import Any

import haliax as hax
import jax
from haliax.partitioning import current_thread_local_mapping, pspec_for_axis
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from lockstep.placement.mesh import MESH_AXES
from lockstep.placement.parameter_spec import parameter_spec


def gather_parameters(tree: PyTree) -> PyTree:
    """Gather the parameters that a part of the model is about to use, and scatter the sums of their gradients.

    This is fully sharded data parallelism (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.3): inside a
    rematerialised layer the backward pass gathers again. Without it XLA is free to move partial sums of activations
    instead, to send weights around a ring in as many permutations as there are devices, or to sum a whole gradient on
    every device before each takes its part.

    Args:
        tree: The parameters as haliax arrays, in the sharding of `parameter_spec`, while a program is traced under a
            training mesh (`jax.set_mesh`) and a haliax axis mapping. Elsewhere nothing is done.

    Returns:
        The same tree, sharded by the axis mapping.
    """
    mesh, mapping = jax.sharding.get_abstract_mesh(), current_thread_local_mapping()
    if mapping is None or mesh.empty or not set(MESH_AXES) <= set(mesh.axis_names):
        return tree

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, hax.NamedArray):
            return leaf
        stored = parameter_spec(leaf.axes, mesh.shape)
        used = NamedSharding(mesh, pspec_for_axis(leaf.axes, mapping))
        return hax.named(_gather(leaf.array, NamedSharding(mesh, stored.spec), used), leaf.axes)

    return jax.tree.map(gather, tree, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(array: Array, stored: NamedSharding, used: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(array, used)


def _forward(array: Array, stored: NamedSharding, used: NamedSharding) -> tuple[Array, None]:
    return _gather(array, stored, used), None


def _backward(stored: NamedSharding, used: NamedSharding, _: None, gradient: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(gradient, stored),)


_gather.defvjp(_forward, _backward)
