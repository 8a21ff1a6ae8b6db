"""Low-rank adapters of the weights of linear layers (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

import dataclasses
import functools
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, Final

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.axis import AxisSelection
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.placement import LazyWeight, Pick, axis_groups, axis_specs, resharded, view
from lockstep.placement.device import barrier, low_rank_product

RANK: Final = "lora_rank"
"""The name of the axis between the two factors of an adapter; no mesh axis splits it."""


class LowRankPair(eqx.Module):
    """The two factors of an adapter."""

    a: NamedArray
    """From the inputs of the layer to the rank."""
    b: NamedArray
    """From the rank to the outputs of the layer."""


class AdaptedWeight(eqx.Module):
    """A weight with an adapter beside it: the layer computes ``x W + scale (x A) B``, and never makes ``A B``."""

    weight: NamedArray
    pair: LowRankPair
    scale: float = eqx.field(static=True)


type Weight = NamedArray | AdaptedWeight
"""The matrix of a linear layer."""


def linear(x: NamedArray, weight: Weight, axis: AxisSelection) -> NamedArray:
    """Return the product of an input and a weight.

    Args:
        axis: The axes that the two have in common.
    """
    if isinstance(weight, NamedArray):
        return hax.dot(x, weight, axis=axis)
    # Sharded as the rows are, so that XLA gathers A, which is small, and not x.
    low = hax.auto_sharded(hax.dot(x, weight.pair.a, axis=axis) * weight.scale)
    return hax.dot(x, weight.weight, axis=axis) + hax.dot(low, weight.pair.b, axis=RANK)


def unchanged(block: Array) -> Array:
    """Return its argument."""
    return block


@dataclasses.dataclass(frozen=True)
class MergeLora:
    """Assembles a weight with a low-rank adapter (https://arxiv.org/abs/2106.09685, eq. 3), summed in float32.

    Args:
        axes: For each axis of the first factor, and of the second, the axis of the weight that it is, or -1 for the
            rank; None where neither has several axes in one.
    """

    equation: str  # the einsum of the two factors that gives the axes of the weight
    scale: float  # the factor of their product
    then: Callable[[Array], Array] = unchanged  # what is done to the sum
    axes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    exact: str | None = None  # with ``numerics: exact`` the float type of engine and trainer, to which all are rounded

    def __call__(self, weight: Array, a: Array, b: Array) -> Array:
        """The merged weight, float32."""
        factors = [a, b]
        if self.axes is not None:
            shapes = [[-1 if axis < 0 else weight.shape[axis] for axis in axes] for axes in self.axes]
            factors = [factor.reshape(shape) for factor, shape in zip(factors, shapes, strict=True)]
        if self.exact is None:
            delta = jnp.einsum(self.equation, *(factor.astype(jnp.float32) for factor in factors))
            return self.then(weight.astype(jnp.float32) + self.scale * delta)
        # Without a barrier XLA leaves out a rounding that is widened again.
        weight, *factors = barrier([array.astype(self.exact) for array in (weight, *factors)])
        delta = exact_change(self.equation, self.scale, *factors)
        return self.then(jnp.asarray(barrier(weight.astype(jnp.float32) + delta)))

    def factor_specs[Axes](self, spec: Sequence[Axes], whole: Axes) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
        """For each axis of both factors what a weight has for that axis in ``spec``; ``whole`` for the rank."""
        assert self.axes is None
        first, second, merged = re.split("->|,", self.equation)
        of = dict(zip(merged, spec, strict=True))
        return tuple(of.get(axis, whole) for axis in first), tuple(of.get(axis, whole) for axis in second)


@functools.partial(jax.jit, static_argnums=(0, 1))
def exact_change(equation: str, scale: float, a: Array, b: Array) -> Array:
    """Return what an adapter adds to a weight in float32, with the same bits whichever part of the weight it is of.

    Args:
        equation: As `MergeLora` has it.
    """
    first, second, merged = re.split("->|,", equation)
    (rank,) = {*first} - {*merged}
    common, left = (
        [axis for axis in merged if axis in first and (axis in second) == shared] for shared in (True, False)
    )
    right = [axis for axis in merged if axis not in first]
    a = a.transpose([first.index(axis) for axis in (*common, *left, rank)])
    b = b.transpose([second.index(axis) for axis in (*common, rank, *right)])
    shape = *a.shape[:-1], *b.shape[len(common) + 1 :]
    a, b = a.reshape(*a.shape[: len(common)], -1, a.shape[-1]), b.reshape(*b.shape[: len(common) + 1], -1)
    multiply = functools.reduce(lambda function, _: jax.vmap(function), common, low_rank_product)
    change = multiply(a, b).reshape(shape).transpose([(*common, *left, *right).index(axis) for axis in merged])
    return jnp.asarray(barrier(scale * barrier(change)))


def narrower(first: Any, second: Any) -> jnp.dtype:
    """Return that of two float types which has fewer bits: that of a computation whose weights have both."""
    return min(jnp.dtype(first), jnp.dtype(second), key=lambda dtype: dtype.itemsize)


def merge_lora(weight: Any, a: Any, b: Any, pattern: str, *, scale: float, **picks: Pick) -> LazyWeight:
    """A weight with a low-rank adapter as the decoder wants it: ``weight + scale * a b``, made while it is moved.

    Nothing is launched or copied. The factors may be placed as they like: they are brought to the blocks of the weight.

    Args:
        weight: The frozen weight, as `lockstep.models.view` takes it: an array, or a list of one for each layer.
        a: The first factor, from the inputs of the layer to the rank; a list where ``weight`` is one.
        b: The second factor, from the rank to the outputs.
        pattern: The names of the axes of the weight, of both factors, and of what the decoder wants, as in
            ``"embed heads head, embed rank, rank heads head -> embed heads head"``. Names in parentheses are one axis
            of a factor: ``rank (heads head)``; of the weight as in `view`, and then the factor has the same:
            ``"embed (two mlp), embed rank, rank (two mlp) -> embed mlp"``. All layers in one array: ``layer`` first in
            what the decoder wants, and in the arrays wherever it is, on the same axis of all three.
        scale: The factor of the product, ``alpha / rank`` in most libraries.
        **picks: What to take of axes, and sizes, as `lockstep.models.view` takes them.

    Returns:
        The weight.

    Raises:
        ConfigError: The pattern does not fit the arrays.

    Example:
        >>> w, a, b = (jax.numpy.ones(shape) for shape in ((4, 6), (4, 2), (2, 6)))
        >>> lockstep.models.merge_lora(w, a, b, "embed mlp, embed rank, rank mlp -> embed mlp", scale=2.0).shape
        (4, 6)
    """
    left, arrow, want = pattern.partition("->")
    sides = [side.strip() for side in left.split(",")]
    if not arrow or len(sides) != 3:
        raise ConfigError(
            f"the pattern {pattern!r} does not have the form 'axes of the weight, of a, of b -> wanted axes'. Write "
            "it like that."
        )
    lists = [isinstance(array, list | tuple) for array in (weight, a, b)]
    if len(set(lists)) > 1:
        raise ConfigError(
            "some of weight, a and b are lists, some are not. Give an array per layer for all, or for none."
        )
    places = {axis_groups(side).index(("layer",)) if "layer" in side.split() else None for side in sides}
    if len(places) > 1:
        raise ConfigError(
            f"the pattern {pattern!r} has the layer on other axes of a factor than of the weight. Put it on the same: "
            "jax.numpy.moveaxis in the train step, or lists of one array for each layer."
        )
    plain = view(weight, f"{sides[0]} -> {want}", **picks)
    every = [list(array) if lists[0] else [array] for array in (weight, a, b)]
    base = every[0][0]
    for number, joint in enumerate(re.findall(r"\([^)]*\)", sides[0])):  # one axis until the product is added
        sides = [side.replace(joint, f"joint_{number}") for side in sides]
    names = [name for name in sides[0].split() if name != "layer"]
    groups = [axis_groups(side) for side in sides[1:]]
    factors = [every[1][0], every[2][0]]
    _check_factors(pattern, sides[0].split(), groups, base, factors, len({len(part) for part in every}))
    if not isinstance(plain, LazyWeight):
        sharding = resharded(base, axis_specs(base))
        plain = LazyWeight((base,), unchanged, base.shape, base.dtype, sharding, stacked=sides[0].startswith("layer "))
    whole = plain.blocks[0] if plain.blocks else None
    specs = axis_specs(base if whole is None else jax.ShapeDtypeStruct(base.shape, base.dtype, sharding=whole))
    split = dict(zip(sides[0].split(), specs, strict=True))
    where = [[split.get(group[0]) for group in side] for side in groups]
    inner = [[group for group in side if group != ("layer",)] for side in groups]
    flat = [[name for group in side for name in group] for side in inner]
    letters = dict(zip(dict.fromkeys([*names, *flat[0], *flat[1]]), string.ascii_letters, strict=False))
    first, second, merged = ("".join(letters[name] for name in side) for side in (*flat, names))
    grouped = any(len(group) > 1 for side in inner for group in side)
    axes = tuple(tuple(names.index(name) if name in names else -1 for name in side) for side in flat)
    return dataclasses.replace(
        plain,
        parts=tuple(tuple(part) if lists[0] else part[0] for part in every),
        assemble=MergeLora(
            equation=f"{first},{second}->{merged}",
            scale=scale,
            then=plain.assemble,
            axes=(axes[0], axes[1]) if grouped else None,
        ),
        blocks=(whole, *(resharded(part[0], spec) for part, spec in zip(every[1:], where, strict=True))),
    )


def _check_factors(
    pattern: str, axes: Sequence[str], groups: Sequence[Any], base: Any, factors: Sequence[Any], lengths: int
) -> None:
    """Refuse a pattern that does not fit: shapes, one rank, and axes that are split inside a group."""
    sizes = {name: size for name, size in zip(axes, base.shape, strict=True) if name != "layer"}
    split = dict(zip(axes, axis_specs(base), strict=True))
    names = set(sizes)
    flat = [{name for group in side for name in group if name != "layer"} for side in groups]
    rank = (flat[0] & flat[1]) - names
    why = ""
    if lengths > 1:
        why = "the lists have different numbers of layers"
    elif len(rank) != 1 or flat[0] | flat[1] != names | rank:
        why = (
            "both factors must have one axis that the weight does not have, the rank, and between them all of its axes"
        )
    for side, factor in zip(groups, factors, strict=True):
        want = [_product(sizes.get(name, 0) for name in group) for group in side]
        have = tuple(factor.shape)
        if len(have) != len(want) or any(size and size != got for size, got in zip(want, have, strict=True)):
            why = (
                why
                or f"a factor has shape {have}, and the pattern with the weight's {tuple(base.shape)} asks for {want}"
            )
        if any(split.get(name) is not None for group in side for name in group[1:]):
            why = why or "an axis of the weight that is split over devices comes second in a group of a factor"
    if why:
        raise ConfigError(f"the pattern {pattern!r} does not fit: {why}. Correct the pattern.")


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
