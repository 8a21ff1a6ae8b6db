"""Weights in another form than the decoder's: described by reference, made while they are resharded."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from lockstep.errors import ConfigError
from lockstep.placement.mesh import axes_of

type Assemble = Callable[..., Array]
"""Makes a weight from its parts, whether they are whole arrays or one device's blocks; a stacked one layer by layer."""


@dataclasses.dataclass(frozen=True)
class LazyWeight:
    """A weight of the decoder that a trainer has in another form; it has the shape that the decoder sees.

    Args:
        parts: The trainer's arrays, by reference. With ``by_layer`` each is a tuple of one array per layer.
        assemble: Makes the weight from its parts, or one layer of it where it is stacked. Programs contain it, so it
            must be hashable and equal to the one of the next round: a function of a module, or a frozen dataclass; a
            ``lambda`` or ``functools.partial`` that the reader makes is another one at each call, and all programs are
            compiled again.
        shape: The shape of the weight as the decoder sees it, with the layer axis if it has one.
        dtype: The dtype of the weight.
        sharding: The sharding that the weight would have if it were made in place, without moving anything.
        stacked: Whether its first axis is the layer.
        by_layer: Whether every layer has arrays of its own.
        blocks: For each part the sharding whose blocks ``assemble`` needs, None for the one that it has; () for all.
        layer_axis: The axis of each part that is the layer, where it is stacked and not ``by_layer``.

    Raises:
        ConfigError: ``assemble`` cannot be hashed.

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
    layer_axis: int = 0

    def __post_init__(self) -> None:
        try:
            hash(self.assemble)
        except TypeError as error:
            raise ConfigError(
                f"the function of a LazyWeight, {self.assemble!r:.200}, cannot be hashed ({error}). Use a function of "
                "a module, or a frozen dataclass whose fields can be hashed."
            ) from None

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return len(self.shape)


type Pick = int | tuple[int, int] | slice
"""An index, a size or a part of an axis, see `view`."""


@dataclasses.dataclass(frozen=True)
class Reorder:
    """The assembly of a weight by `view`: axis ``i`` of the weight is axis ``order[i]`` of its only part.

    Args:
        picks: For some axes of the part, once joint ones are taken apart, the axis and the index to take, or the first
            index and the one after the last.
        order: The order in which the weight has the axes that are left.
        inner: For each axis of the part the sizes of the axes in it but the first, whose size a block may have less of.
    """

    picks: tuple[tuple[int, int | tuple[int, int]], ...]
    order: tuple[int, ...]
    inner: tuple[tuple[int, ...], ...]

    def __call__(self, block: Array) -> Array:
        """The block in the wanted order."""
        if any(self.inner):
            sizes = zip(block.shape, self.inner, strict=True)
            block = block.reshape([size for whole, rest in sizes for size in (whole // math.prod(rest), *rest)])
        at = {axis: slice(*taken) if isinstance(taken, tuple) else taken for axis, taken in self.picks}
        return block[tuple(at.get(axis, slice(None)) for axis in range(block.ndim))].transpose(self.order)


def view(array: Any, pattern: str, **picks: Pick) -> Any:
    """A weight as the decoder wants it from an array, or one array per layer, in another order of axes.

    Nothing is launched or copied. The name ``layer`` says that an array holds all layers, along whichever axis; a list
    or tuple has an array for each layer, and the weight gets the layer axis in front.

    Args:
        array: An array or shape struct, or a list of one for each layer.
        pattern: The names of the array's axes and of the weight's, as in ``"layer out embed -> layer embed out"``.
            Names in parentheses are one axis of the array, the last one running fastest:
            ``"embed (two mlp) -> embed mlp"``. Where devices share an axis of which the weight takes a part, each of
            them gets the whole axis while the weight is made.
        **picks: The index to take of an axis that the weight does not have, with the size of the axis where that is
            in parentheses: ``two=(0, 2)``; the slice to take of another one, or its size in parentheses.

    Returns:
        The array itself where nothing is to be changed, else a `LazyWeight`.

    Raises:
        ConfigError: The pattern does not fit the array, or layers differ in shape. Where they differ in dtype or
            placement, they are cast and moved to the common one while the weight is made.

    Example:
        >>> kernel = jax.ShapeDtypeStruct((2, 48, 32), "float32")
        >>> lockstep.models.view(kernel, "layer out embed -> layer embed out").shape
        (2, 32, 48)
        >>> lockstep.models.view(kernel, "layer (two mlp) embed -> layer embed mlp", two=(1, 2)).shape  # gate and up
        (2, 32, 24)
    """
    by_layer = isinstance(array, list | tuple)
    layers = list(array) if by_layer else [array]
    first = layers[0]
    groups, want = axis_groups(pattern.partition("->")[0]), pattern.partition("->")[2].split()
    have = [name for group in groups for name in group]
    picked = [name for name in picks if name not in want]
    fits = len(have) == len(set(have)) and len(groups) == first.ndim and sorted(have) == sorted([*want, *picked])
    if not (fits and set(picks) <= set(have)) or (
        "layer" in have and (by_layer or ("layer",) not in groups or want[0] != "layer")
    ):
        raise ConfigError(
            f"the pattern {pattern!r} with {picks or 'no picks'} does not fit an array of shape {tuple(first.shape)}: "
            "it must name each axis of the array once, every axis must be wanted or picked, and the layer is the first "
            "of the weight. Correct it, or pass one model where the array has several (vmap, pmap)."
        )
    even = not by_layer or not layer_differences(layers)
    first = first if even else common_layer(layers)
    if not by_layer and have == want and not picks:
        return array
    sizes = {
        name: size
        for group, whole in zip(groups, first.shape, strict=True)
        for name, size in _axis_sizes(pattern, group, whole, picks).items()
    }
    parts = {name: _taken(pattern, name, sizes[name], name in want, pick) for name, pick in picks.items()}
    taken = {name: part for name, part in parts.items() if part is not None}
    specs, kept, where = axis_specs(first), list[Any](), sharding_of(first)
    on_axis = dict(where.mesh.shape) if isinstance(where, NamedSharding) else {}
    for group, spec in zip(groups, specs, strict=True):
        count = math.prod(on_axis[name] for name in (spec if isinstance(spec, tuple) else (spec,)) if name)
        kept.append(spec if group[0] not in taken and sizes[group[0]] % count == 0 else None)
    split = {group[0]: spec for group, spec in zip(groups, kept, strict=True)}
    inner = [group for group in groups if group != ("layer",)]
    names = [name for group in inner for name in group]
    left = [name for name in names if not isinstance(taken.get(name), int)]
    assemble = Reorder(
        picks=tuple((names.index(name), part) for name, part in taken.items()),
        order=tuple(left.index(name) for name in want if name != "layer"),
        inner=tuple(tuple(sizes[name] for name in group[1:]) for group in inner),
    )
    for name, part in taken.items():
        sizes[name] = 1 if isinstance(part, int) else part[1] - part[0]
    shape, spec = tuple(sizes[name] for name in want), tuple(split.get(name) for name in want)
    return LazyWeight(
        parts=(tuple(layers),) if by_layer else (array,),
        assemble=assemble,
        shape=(len(layers), *shape) if by_layer else shape,
        dtype=first.dtype,
        sharding=resharded(first, (None, *spec) if by_layer else spec),
        stacked=by_layer or want[0] == "layer",
        by_layer=by_layer,
        blocks=() if even and tuple(kept) == specs else (resharded(first, kept),),
        layer_axis=groups.index(("layer",)) if "layer" in have else 0,
    )


def common_layer(layers: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """The form that the layers of a weight are brought to: the dtype that holds all of them, the placement of most.

    Raises:
        ConfigError: They differ in shape.
    """
    for number, layer in enumerate(layers):
        if layer.shape != layers[0].shape:
            raise ConfigError(
                f"the layers of a weight differ in shape: layer 0 is {tuple(layers[0].shape)} and layer {number} is "
                f"{tuple(layer.shape)}. Give arrays of one shape, or the layers of another kind as another weight."
            )
    dtype = functools.reduce(np.promote_types, (layer.dtype for layer in layers))
    (sharding, _), *_ = Counter(map(sharding_of, layers)).most_common()
    return jax.ShapeDtypeStruct(layers[0].shape, dtype, sharding=sharding)


def layer_differences(layers: Sequence[Any]) -> list[str]:
    """Return how layers differ in shape, dtype or placement: the first layer of each form; none where all agree.

    Example:
        >>> lockstep.placement.layer_differences([jax.numpy.ones(2), jax.numpy.ones(2, "bfloat16")])
        ['layer 0 float32[2]', 'layer 1 bfloat16[2]']
    """
    forms: dict[Any, int] = {}
    for number, layer in enumerate(layers):
        forms.setdefault((layer.shape, layer.dtype, sharding_of(layer)), number)
    if len(forms) == 1:
        return []
    placed = len({sharding for _, _, sharding in forms}) > 1
    return [
        f"layer {number} {np.dtype(dtype).name}[{','.join(map(str, shape))}]" + f" {sharding_text(sharding)}" * placed
        for (shape, dtype, sharding), number in forms.items()
    ]


def sharding_text(sharding: Sharding | None) -> str:
    """A placement for an error: the partition spec, the mesh, and its devices in the order of the mesh."""
    if not isinstance(sharding, NamedSharding):
        return f"on {sharding}"
    ids = [device.id for device in sharding.mesh.devices.flat] if isinstance(sharding.mesh, Mesh) else []
    shown = f"{', '.join(map(str, ids[:8]))}{', …' * (len(ids) > 8)}"
    return f"{sharding.spec} on {dict(sharding.mesh.shape)} of devices {shown}"


def axis_groups(side: str) -> list[tuple[str, ...]]:
    """The axes of an array in a pattern, each as the names that are in it."""
    return [tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", side)]


def _axis_sizes(pattern: str, group: tuple[str, ...], whole: int, picks: Mapping[str, Pick]) -> dict[str, int]:
    """The size of each axis in one of the array's."""
    sizes: dict[str, int] = {}
    for name in group:
        pick = picks.get(name)
        if isinstance(pick, tuple):
            sizes[name] = pick[1]
        elif isinstance(pick, int) and name in pattern.partition("->")[2].split():
            sizes[name] = pick
    open_ = [name for name in group if name not in sizes]
    if len(open_) > 1:
        raise ConfigError(
            f"the pattern {pattern!r} does not say how large {' and '.join(open_)} are, which are {whole} together. "
            f"Give the size of all but one: {open_[-1]}=SIZE of a wanted axis, {open_[0]}=(INDEX, SIZE) of another."
        )
    if open_:
        sizes[open_[0]] = whole // max(1, math.prod(sizes.values()))
    if math.prod(sizes.values()) != whole:
        raise ConfigError(
            f"the pattern {pattern!r} does not fit: {' x '.join(f'{name} {sizes[name]}' for name in group)} is not the "
            f"size of the array's axis, {whole}. Correct a size."
        )
    return sizes


def _taken(pattern: str, name: str, size: int, is_kept: bool, pick: Pick) -> int | tuple[int, int] | None:
    """The part of an axis that the weight takes: an index, or the first and the one after the last; None for all."""
    if isinstance(pick, slice):
        first, end = pick.start or 0, size if pick.stop is None else pick.stop
        if is_kept and pick.step in (None, 1) and 0 <= first < end <= size:
            return first, end
    elif is_kept and isinstance(pick, int):
        return None
    elif not is_kept and 0 <= (index := pick[0] if isinstance(pick, tuple) else pick) < size:
        return index
    raise ConfigError(
        f"the pattern {pattern!r} cannot take {name}={pick} of an axis of {size}. Of a wanted axis give a slice inside "
        "of it, of another one an index below its size."
    )


def axis_specs(array: Any) -> tuple[Any, ...]:
    """For each axis of an array, the mesh axes that split it; None where it is not split or not on a mesh."""
    sharding = sharding_of(array)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return spec + (None,) * (array.ndim - len(spec))


def resharded(array: Any, spec: Sequence[Any]) -> Sharding | None:
    """The sharding of ``array`` with other entries."""
    sharding = sharding_of(array)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec)) if isinstance(sharding, NamedSharding) else sharding


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The function that makes a weight of its parts, without the parts: a traced function may keep it."""

    assemble: Assemble
    stacked: bool
    by_layer: bool
    layer_axis: int = 0

    def layers(self, parts: tuple[Any, ...]) -> tuple[Array, ...]:
        """The parts with all layers in one array each."""
        if self.by_layer:
            return tuple(map(_stacked, parts))
        return tuple(jnp.moveaxis(part, self.layer_axis, 0) for part in parts) if self.layer_axis else parts

    def make(self, parts: tuple[Any, ...]) -> Array:
        """The weight from arrays or blocks in place of its parts."""
        return jax.vmap(self.assemble)(*self.layers(parts)) if self.stacked else self.assemble(*parts)


def _stacked(layers: Sequence[Array]) -> Array:
    """All layers in one array, in the dtype that holds all of them."""
    dtype = functools.reduce(np.promote_types, (layer.dtype for layer in layers))
    return jnp.stack([layer.astype(dtype) for layer in layers])


def weight_specs(weights: PyTree) -> PyTree:
    """The `WeightSpec` of each weight; a plain array is its own only part."""
    return jax.tree.map(
        lambda leaf: (
            WeightSpec(leaf.assemble, leaf.stacked, leaf.by_layer, leaf.layer_axis)
            if isinstance(leaf, LazyWeight)
            else WeightSpec(unchanged, stacked=False, by_layer=False)
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
            return (struct_of(leaf),)
        shardings = leaf.blocks or (None,) * len(leaf.parts)
        return tuple(
            jax.tree.map(lambda array, sharding=sharding: struct_of(array, sharding), part)
            for part, sharding in zip(leaf.parts, shardings, strict=True)
        )

    return jax.tree.map(structs, weights)


def shape_structs(weights: PyTree) -> PyTree:
    """Shape structs with shardings in place of all arrays, those that a `LazyWeight` is made of too.

    Two models of which these are equal are resharded and decoded by the same programs.
    """

    def without_arrays(leaf: Any) -> Any:
        if isinstance(leaf, LazyWeight):
            return dataclasses.replace(leaf, parts=jax.tree.map(struct_of, leaf.parts))
        return struct_of(leaf)

    return jax.tree.map(without_arrays, weights)


def is_lazy(weights: PyTree) -> bool:
    """Whether any weight has yet to be made."""
    return any(isinstance(leaf, LazyWeight) for leaf in jax.tree.leaves(weights))


def struct_of(array: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The shape, dtype and placement of an array, or another placement."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding or sharding_of(array))


def sharding_of(array: Any) -> Sharding | None:
    """The sharding of an array, written as short as can be; None for one of NumPy.

    XLA returns ``P("fsdp", None)`` from a step that took ``P("fsdp")``, and ``P("fsdp")`` from one that took
    ``P("fsdp", "tp")`` where ``tp`` has one device: the same placement, which must compare equal.
    """
    sharding: Sharding | None = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes, spec = sharding.mesh.shape, list[Any]()
    for entry in sharding.spec:
        names = tuple(name for name in axes_of(entry) if sizes[name] > 1)
        spec.append(names[0] if len(names) == 1 else names or None)
    while spec and spec[-1] is None:
        spec.pop()
    return sharding if tuple(sharding.spec) == tuple(spec) else sharding.update(spec=PartitionSpec(*spec))


def unchanged(block: Array) -> Array:
    """The weight of one block."""
    return block
