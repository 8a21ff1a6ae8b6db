"""Weights in another form than the decoder's: described by reference, made while they are resharded."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from lockstep.errors import ConfigError

type Assemble = Callable[..., Array]
"""Makes a weight from its parts, whether they are whole arrays or one device's blocks; a stacked one layer by layer.

It must be hashable and equal to the one of the next round: a function of a module, or a frozen dataclass.
"""


@dataclasses.dataclass(frozen=True)
class LazyWeight:
    """A weight of the decoder that a trainer has in another form; it has the shape that the decoder sees.

    Args:
        parts: The trainer's arrays, by reference. With ``by_layer`` each is a tuple of one array per layer.
        assemble: Makes the weight from its parts, or one layer of it where it is stacked.
        shape: The shape of the weight as the decoder sees it, with the layer axis if it has one.
        dtype: The dtype of the weight.
        sharding: The sharding that the weight would have if it were made in place, without moving anything.
        stacked: Whether its first axis is the layer.
        by_layer: Whether every layer has arrays of its own.
        blocks: For each part the sharding whose blocks ``assemble`` needs, None for the one that it has; () for all.

    Example:
        >>> def doubled(block):
        ...     return 2 * block
        >>> array = model.embed.array
        >>> lockstep.models.LazyWeight(
        ...     parts=(array,), assemble=doubled, shape=array.shape, dtype=array.dtype, sharding=array.sharding
        ... ).ndim
        2
    """

    parts: tuple[Any, ...]
    assemble: Assemble
    shape: tuple[int, ...]
    dtype: jnp.dtype
    sharding: Sharding | None
    stacked: bool = False
    by_layer: bool = False
    blocks: tuple[Sharding | None, ...] = ()

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class Reorder:
    """The assembly of a weight by `view`: axis ``i`` of the weight is axis ``order[i]`` of its only part.

    Args:
        picks: For each axis of the part that the weight does not have, the axis and the index to take.
        order: The order in which the weight has the axes that are left.
    """

    picks: tuple[tuple[int, int], ...]
    order: tuple[int, ...]

    def __call__(self, block: Array) -> Array:
        """The block in the wanted order."""
        at = dict(self.picks)
        return block[tuple(at.get(axis, slice(None)) for axis in range(block.ndim))].transpose(self.order)


def view(array: Any, pattern: str, **picks: int) -> Any:
    """A weight as the decoder wants it from an array, or one array per layer, in another order of axes.

    Nothing is launched or copied. The first name ``layer`` says that an array holds all layers; a list or tuple has an
    array for each layer, and the weight gets the layer axis in front.

    Args:
        array: An array or shape struct, or a list of one for each layer.
        pattern: The names of the array's axes and of the weight's, as in ``"layer out embed -> layer embed out"``.
        **picks: The index to take of each axis that the weight does not have.

    Returns:
        The array itself where nothing is to be changed, else a `LazyWeight`.

    Raises:
        ConfigError: The pattern does not fit the array, or layers differ in shape, dtype or placement.

    Example:
        >>> kernel = jax.ShapeDtypeStruct((2, 48, 32), "float32")
        >>> lockstep.models.view(kernel, "layer out embed -> layer embed out").shape
        (2, 32, 48)
    """
    by_layer = isinstance(array, list | tuple)
    layers = list(array) if by_layer else [array]
    first = layers[0]
    have, want = (side.split() for side in pattern.split("->"))
    fits = len(have) == len(set(have)) == first.ndim and sorted(have) == sorted([*want, *picks])
    if not fits or ("layer" in have and (by_layer or have[0] != "layer" or want[0] != "layer")):
        raise ConfigError(
            f"the pattern {pattern!r} with {picks or 'no picks'} does not fit an array of shape {tuple(first.shape)}: "
            "it must name each axis of the array once, the layer first, and every axis must be wanted or picked."
        )
    for layer in layers:
        one, other = ((each.shape, each.dtype, _sharding(each)) for each in (first, layer))
        if one != other:
            raise ConfigError(
                f"the layers of a weight differ: {one} and {other}. All layers must have the same shape, dtype and "
                "placement."
            )
    if not by_layer and have == want:
        return array
    stacked = by_layer or want[0] == "layer"
    inner = [name for name in have if name != "layer"]
    left = [name for name in inner if name not in picks]
    assemble = Reorder(
        picks=tuple((inner.index(name), index) for name, index in picks.items()),
        order=tuple(left.index(name) for name in want if name != "layer"),
    )
    shape = tuple(first.shape[have.index(name)] for name in want)
    spec = tuple(axis_specs(first)[have.index(name)] for name in want)
    return LazyWeight(
        parts=(tuple(layers),) if by_layer else (array,),
        assemble=assemble,
        shape=(len(layers), *shape) if by_layer else shape,
        dtype=first.dtype,
        sharding=resharded(first, (None, *spec) if by_layer else spec),
        stacked=stacked,
        by_layer=by_layer,
    )


def axis_specs(array: Any) -> tuple[Any, ...]:
    """For each axis of an array, the mesh axes that split it; None where it is not split or not on a mesh."""
    sharding = _sharding(array)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return spec + (None,) * (array.ndim - len(spec))


def resharded(array: Any, spec: Sequence[Any]) -> Sharding | None:
    """The sharding of ``array`` with other entries."""
    sharding = _sharding(array)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec)) if isinstance(sharding, NamedSharding) else sharding


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The function that makes a weight of its parts, without the parts: a traced function may keep it."""

    assemble: Assemble
    stacked: bool
    by_layer: bool

    def layers(self, parts: tuple[Any, ...]) -> tuple[Array, ...]:
        """The parts with all layers in one array each."""
        return tuple(jnp.stack(part) for part in parts) if self.by_layer else parts

    def make(self, parts: tuple[Any, ...]) -> Array:
        """The weight from arrays or blocks in place of its parts."""
        return jax.vmap(self.assemble)(*self.layers(parts)) if self.stacked else self.assemble(*parts)


def weight_specs(weights: PyTree) -> PyTree:
    """The `WeightSpec` of each weight; a plain array is its own only part."""
    return jax.tree.map(
        lambda leaf: (
            WeightSpec(leaf.assemble, leaf.stacked, leaf.by_layer)
            if isinstance(leaf, LazyWeight)
            else WeightSpec(_keep, stacked=False, by_layer=False)
        ),
        weights,
    )


def sources(weights: PyTree) -> PyTree:
    """The arrays that each weight is made of, as tuples in its place."""
    return jax.tree.map(lambda leaf: leaf.parts if isinstance(leaf, LazyWeight) else (leaf,), weights)


def block_sources(weights: PyTree) -> PyTree:
    """`sources` as shape structs, each with the sharding whose blocks its weight is made of."""

    def structs(leaf: Any) -> tuple[Any, ...]:
        if not isinstance(leaf, LazyWeight):
            return (_struct(leaf),)
        wanted = leaf.blocks or (None,) * len(leaf.parts)
        return tuple(
            jax.tree.map(lambda array, other=other: _struct(array, other), part)
            for part, other in zip(leaf.parts, wanted, strict=True)
        )

    return jax.tree.map(structs, weights)


def shape_structs(weights: PyTree) -> PyTree:
    """Shape structs with shardings in place of all arrays, those that a `LazyWeight` is made of too.

    Two models of which these are equal are resharded and decoded by the same programs.
    """

    def without_arrays(leaf: Any) -> Any:
        if isinstance(leaf, LazyWeight):
            return dataclasses.replace(leaf, parts=jax.tree.map(_struct, leaf.parts))
        return _struct(leaf)

    return jax.tree.map(without_arrays, weights)


def is_lazy(weights: PyTree) -> bool:
    """Whether any weight has yet to be made."""
    return any(isinstance(leaf, LazyWeight) for leaf in jax.tree.leaves(weights))


def _struct(array: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The shape, dtype and placement of an array, or another placement."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding or _sharding(array))


def _sharding(array: Any) -> Sharding | None:
    """The sharding of an array, written as short as can be; None for one of NumPy.

    XLA returns ``P("fsdp", None)`` from a step that took ``P("fsdp")``: the same placement, which must compare equal.
    """
    found: Sharding | None = getattr(array, "sharding", None)
    if not isinstance(found, NamedSharding):
        return found
    used = 1 + max((index for index, axes in enumerate(found.spec) if axes not in (None, ())), default=-1)
    return found if used == len(found.spec) else found.update(spec=PartitionSpec(*found.spec[:used]))


def _keep(block: Array) -> Array:
    return block
