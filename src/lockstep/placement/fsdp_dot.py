"""Products with parameters that are gathered for them, and whose gradients are scattered (FSDP).

Left to itself, XLA sends the pieces of a weight around a ring in as many permutations as there are devices, or sums a
whole gradient on every device before each takes its part (an all-reduce, twice the bytes of a reduce-scatter).
"""

import functools
from collections.abc import Sequence
from typing import Final

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import current_thread_local_mapping, pspec_for_axis
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lockstep.placement.mesh import MESH_AXES
from lockstep.placement.parameter_spec import parameter_spec

_FSDP: Final = "fsdp"
_DP: Final = "dp"
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"

type Names = tuple[str, ...]
"""The names of axes."""

type Mapping = tuple[tuple[str, str | Sequence[str]], ...]
"""An axis mapping that can be hashed."""

type Saved = tuple[NamedArray, NamedArray, NamedArray | None]
"""What the backward pass needs: the activation, the parameter's pieces, and the whole of it where that is at hand."""


def fsdp_dot(x: NamedArray, weight: NamedArray, axes: Axis | Sequence[Axis], *, recomputed: bool) -> NamedArray:
    """Contract an activation with a parameter, which every device has a piece of.

    Fully sharded data parallelism (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.3): the pieces are gathered in
    the dtype of ``weight``; the backward pass gathers them again; each device multiplies its own rows to a sum for the
    whole gradient, and these are added up while they are scattered. All collectives are along the first axis of what
    they move, so that no piece is narrower than it has to be.

    Args:
        x: The activation, split by the axis mapping that is set.
        weight: The parameter, split as `parameter_spec` says.
        axes: The axes that are summed over.
        recomputed: Whether the backward pass computes this layer again and thereby gathers the parameter. Else the
            product gathers it again itself, for what was gathered is never kept.

    Returns:
        The product, with the other axes of ``x`` first; that of `haliax.dot` where FSDP splits nothing.
    """
    names = tuple(axis.name for axis in ((axes,) if isinstance(axes, Axis) else axes))
    mesh, mapping = jax.sharding.get_abstract_mesh(), current_thread_local_mapping()
    if mapping is None or mesh.empty or not set(MESH_AXES) <= set(mesh.axis_names) or mesh.shape[_FSDP] == 1:
        return hax.dot(x, weight, axis=names)
    split = {name for entry in pspec_for_axis(x.axes, mapping) for name in _names(entry)}
    if not {_DP, _FSDP} <= split:  # devices without rows of their own: their sums are not parts of the whole sum
        return hax.dot(x, weight, axis=names)
    key = tuple((name, on if isinstance(on, str) else tuple(on)) for name, on in mapping.items())
    whole = jax.lax.stop_gradient(_gathered(weight, key)) if recomputed else None
    return _dot(x, weight, whole, names, key)


# The backward pass is traced when the axis mapping is not set any more, so that it is an argument.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dot(x: NamedArray, weight: NamedArray, whole: NamedArray | None, names: Names, mapping: Mapping) -> NamedArray:
    return hax.dot(x, _gathered(weight, mapping) if whole is None else whole, axis=names)


def _forward(
    x: NamedArray, weight: NamedArray, whole: NamedArray | None, names: Names, mapping: Mapping
) -> tuple[NamedArray, Saved]:
    return _dot(x, weight, whole, names, mapping), (x, weight, whole)


def _backward(
    names: Names, mapping: Mapping, saved: Saved, gradient: NamedArray
) -> tuple[NamedArray, NamedArray, None]:
    x, weight, whole = saved
    whole = _gathered(weight, mapping) if whole is None else whole
    others = [axis.name for axis in weight.axes if axis.name not in names]
    to_x = hax.dot(gradient, whole, axis=others).rearrange(x.axes).astype(x.dtype)
    return to_x, _scattered(x, gradient, weight, mapping), None


_dot.defvjp(_forward, _backward)


def _gathered(weight: NamedArray, mapping: Mapping) -> NamedArray:
    """The whole parameter but for what tensor parallelism splits, with the axis first that its pieces are along."""
    mesh = jax.sharding.get_abstract_mesh()
    stored = parameter_spec(weight.axes, mesh.shape).spec
    dim = _split_dim(stored)
    if dim is None:
        return weight
    axes = (weight.axes[dim], *weight.axes[:dim], *weight.axes[dim + 1 :])

    def gather(piece: Array) -> Array:
        return jax.lax.all_gather(jnp.moveaxis(piece, dim, 0), _FSDP, tiled=True)

    whole = jax.shard_map(
        gather, mesh=mesh, in_specs=stored, out_specs=pspec_for_axis(axes, dict(mapping)), check_vma=False
    )(weight.array)
    return hax.named(whole, axes)


def _scattered(x: NamedArray, gradient: NamedArray, weight: NamedArray, mapping: Mapping) -> NamedArray:
    """The pieces of a parameter's gradient: each device's own sums, added up over devices while they are scattered."""
    mesh = jax.sharding.get_abstract_mesh()
    stored = parameter_spec(weight.axes, mesh.shape).spec
    dim = _split_dim(stored)
    first = dim or 0
    names = [axis.name for axis in weight.axes]
    letters: dict[str, str] = {}
    for axis in (*x.axes, *gradient.axes):
        letters.setdefault(axis.name, _LETTERS[len(letters)])
    inputs = ["".join(letters[axis.name] for axis in each.axes) for each in (x, gradient)]
    result = "".join(letters[name] for name in (names[first], *names[:first], *names[first + 1 :]))

    def scatter(x: Array, gradient: Array) -> Array:
        sums = jnp.einsum(f"{inputs[0]},{inputs[1]}->{result}", x, gradient).astype(weight.dtype)
        if mesh.shape[_DP] > 1:
            sums = jax.lax.psum(sums, _DP)
        if dim is None:
            return jax.lax.psum(sums, _FSDP)
        return jnp.moveaxis(jax.lax.psum_scatter(sums, _FSDP, tiled=True), 0, dim)

    specs = (pspec_for_axis(x.axes, dict(mapping)), pspec_for_axis(gradient.axes, dict(mapping)))
    pieces = jax.shard_map(scatter, mesh=mesh, in_specs=specs, out_specs=stored, check_vma=False)(
        x.array, gradient.array
    )
    return hax.named(pieces, weight.axes)


def _split_dim(spec: PartitionSpec) -> int | None:
    """The axis that FSDP splits; None where it splits none."""
    return next((dim for dim, entry in enumerate(spec) if _FSDP in _names(entry)), None)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split an axis."""
    return (entry,) if isinstance(entry, str) else entry or ()
