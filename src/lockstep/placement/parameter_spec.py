"""Which axis of a parameter the devices of a mesh split: a pure function of the parameter's axes and the mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from jax.sharding import PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement.mesh import PARAMETER_AXES

LANES: Final = 128
"""The numbers in a row of a TPU's tile: an array whose last axis is shorter is padded to it.

https://docs.jax.dev/en/latest/pallas/tpu/details.html
"""

SUBLANES: Final = 16
"""The rows of a tile of 16-bit numbers, the type that weights are gathered in."""

_FSDP: Final = "fsdp"
_OTHERS: Final = ("mlp", "vocab", "kv_head")
"""The axes that FSDP may split instead of ``embed``, the first that works."""


class NamedAxis(Protocol):
    """An axis with a name and a size, as haliax has it."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def size(self) -> int:
        """The number of elements."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """How the devices of a mesh split a parameter.

    Args:
        spec: The mesh axes of each axis of the parameter.
        thin: The name of the axis whose pieces fill only a part of a tile; None where there is none.
        piece: The size of a device's piece along that axis; 0 where there is none.
    """

    spec: PartitionSpec
    thin: str | None = None
    piece: int = 0


def parameter_spec(axes: Sequence[NamedAxis], mesh_shape: Mapping[str, int], name: str = "") -> ParameterSpec:
    """Choose the axis that FSDP splits, beside what tensor parallelism splits.

    That is ``embed``, unless a device's piece of it would be thinner than a tile, and there is another axis whose
    pieces are not: on 128 devices a matrix ``[mlp 28672, embed 8192]`` is split into 224 rows each, not into 64
    columns, which a TPU would store as 128 and could not gather as they are. A vector that could only be split into
    thin pieces stays whole on every device. A parameter without ``embed`` is not split by FSDP.

    Args:
        axes: The named axes of the parameter, in order.
        mesh_shape: The size of each axis of the mesh, with the names ``fsdp`` and ``tp``.
        name: The name of the parameter, for errors.

    Returns:
        The choice, the same on every host and for every reader of the parameter.

    Raises:
        ConfigError: The mesh does not divide an axis.
    """
    names = [axis.name for axis in axes]
    split: dict[str, tuple[str, ...]] = {}
    for axis in axes:
        mesh_axis = PARAMETER_AXES.get(axis.name)
        if mesh_axis is None:
            continue
        if axis.size % mesh_shape[mesh_axis]:
            raise ConfigError(
                f"parameter {name}: its axis {axis.name!r} has size {axis.size}, which the "
                f"mesh axis {mesh_axis!r} of size {mesh_shape[mesh_axis]} does not divide. Choose a mesh_shape "
                f"whose {mesh_axis} divides {axis.size} (mesh now: {dict(mesh_shape)}), or change the model."
            )
        if mesh_axis != _FSDP:
            split[axis.name] = (mesh_axis,)
    if "embed" not in names:
        return ParameterSpec(spec=_spec(names, split))
    devices = mesh_shape[_FSDP]
    sizes = {axis.name: axis.size // _parts(split.get(axis.name, ()), mesh_shape) for axis in axes}
    whole = [size for name, size in sizes.items() if name != "layer"]
    thin = {name: _is_thin(names, name, sizes[name] // devices) for name in names}
    chosen = "embed"
    if devices > 1 and thin["embed"]:
        works = [one for one in _OTHERS if one in sizes and sizes[one] % devices == 0 and not thin[one]]
        if works:
            chosen = works[0]
        elif len(whole) == 1:
            return ParameterSpec(spec=_spec(names, split))
    split[chosen] = (*split.get(chosen, ()), _FSDP)
    if devices > 1 and thin[chosen]:
        return ParameterSpec(spec=_spec(names, split), thin=chosen, piece=sizes[chosen] // devices)
    return ParameterSpec(spec=_spec(names, split))


def _is_thin(names: Sequence[str], name: str, piece: int) -> bool:
    """Whether pieces of an axis fill only a part of a tile, which has the last two axes."""
    from_last = len(names) - 1 - names.index(name)
    return piece < (LANES, SUBLANES)[from_last] if from_last < 2 else False


def _parts(mesh_axes: Sequence[str], mesh_shape: Mapping[str, int]) -> int:
    count = 1
    for axis in mesh_axes:
        count *= mesh_shape[axis]
    return count


def _spec(names: Sequence[str], split: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    entries = (split.get(name, ()) for name in names)
    return PartitionSpec(*(None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries))
