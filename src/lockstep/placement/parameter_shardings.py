"""Where every array of a model or of an optimizer's state is placed on a mesh."""

from typing import Any

import haliax as hax
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from lockstep.placement.parameter_spec import parameter_spec


def parameter_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return the sharding of every array of a model or of an optimizer state.

    Args:
        tree: Haliax arrays or their shapes; an array without axis names is replicated.
        mesh: The mesh of the run.

    Returns:
        The tree with a sharding in place of each array.

    Raises:
        ConfigError: The mesh does not divide an axis.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> Any:
        if not _named(leaf):
            return NamedSharding(mesh, PartitionSpec())
        chosen = parameter_spec(leaf.axes, mesh.shape, jax.tree_util.keystr(path))
        return jax.tree.map(lambda _: NamedSharding(mesh, chosen.spec), leaf)

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=_named)


def _named(leaf: Any) -> bool:
    return isinstance(leaf, hax.NamedArray)
