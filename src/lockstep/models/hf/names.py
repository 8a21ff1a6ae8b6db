"""The tensors of a Hugging Face checkpoint: which parameter each one has, and how their axes correspond."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from haliax import NamedArray

from lockstep.errors import ConfigError
from lockstep.models.weights import STACKED, haliax_axes, input_dims


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """One parameter as Hugging Face stores it: one tensor, or one per layer, or per layer and expert.

    Args:
        template: The tensor's name in the checkpoint, with ``{layer}`` for the number of the layer. With ``{expert}``
            its rows are those of the experts' tensors, one after the other.
        dims: The named axes flattened into each dimension of the stored tensor, the slowest first.
    """

    template: str
    dims: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, weight: str, template: str) -> Self:
        """Return how a weight is stored: outputs before inputs, as torch has it, unless experts share a tensor."""
        named = haliax_axes(weight)
        axes = tuple(axis for axis in named if axis != "layer")
        if axes[0] == "expert" and "{expert}" not in template:  # one tensor for all experts, with our order of axes
            return cls(template, tuple((axis,) for axis in axes))
        if axes[-1] == "width":  # a convolution of each channel, which has one input
            return cls(template, (axes[:-2], axes[-2:-1], axes[-1:]))
        inputs = ("embed",) if "vocab" in axes else tuple(named[dim] for dim in input_dims(weight, len(named)))
        outputs = tuple(axis for axis in axes if axis not in inputs)
        return cls(template, (outputs, inputs) if inputs else (axes,))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the stored shape, given the sizes of the named axes."""
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.dims)

    def to_stored(self, array: np.ndarray, axes: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
        """Convert one layer's parameter, with the given order of axes, to the stored tensor."""
        flat = [axis for group in self.dims for axis in group]
        return np.ascontiguousarray(array.transpose([axes.index(a) for a in flat]).reshape(self.shape(sizes)))

    def from_stored(self, stored: Any, axes: Sequence[str], sizes: Mapping[str, int]) -> Any:
        """Convert a stored tensor, or a part of one of these sizes, to the parameter with the given order of axes."""
        flat = [axis for group in self.dims for axis in group]
        return stored.reshape([sizes[axis] for axis in flat]).transpose([flat.index(axis) for axis in axes])


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a model and its Hugging Face tensors."""

    name: str
    """The name of the weight, see `lockstep.models.weights`."""
    path: str
    """The dotted path in `LlamaLMHeadModel`."""
    value: NamedArray
    """The parameter, or its shape where the model is a skeleton."""
    stored: HFTensor
    """Its tensors in the checkpoint."""
    layers: Sequence[int | None] = (None,)
    """The numbers of the layers that it has a tensor for, one after the other; None alone where it is not per layer."""
    first_row: int = 0
    """The row of its tensors at which it begins: not 0 where they have the rows of several parameters."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of one layer's part."""
        return tuple(axis.name for axis in self.value.axes if axis.name != "layer")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all its axes by name."""
        return {axis.name: axis.size for axis in self.value.axes}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its rows of one layer."""
        return self.stored.shape(self.sizes)

    def names(self, layer: int | None) -> list[str]:
        """Return the names of the tensors of one layer, whose rows follow one another: one, or one for each expert."""
        template = self.stored.template
        experts = range(self.sizes["expert"]) if "{expert}" in template else [None]
        return [template.format(layer=layer, expert=expert) for expert in experts]


def parameters(model: Any, tensors: Mapping[str, str]) -> list[Parameter]:
    """Return every parameter of a model, or of its skeleton, in the order of the model's tree.

    Args:
        tensors: The names of the tensors of its family by weight.

    Raises:
        ConfigError: The model has a weight that the family lacks.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, NamedArray))
    listed: list[Parameter] = []
    for path, leaf in leaves:
        dotted = jax.tree_util.keystr(path, simple=True, separator=".")
        name = dotted.rpartition(".")[2]
        if name not in tensors:
            raise ConfigError(
                f"the model has the weight {dotted}, which the checkpoints of its family lack. Check model.type."
            )
        layers = model.config.layers_of(name) if name in STACKED else (None,)
        listed.append(Parameter(name, dotted, leaf, HFTensor.of(name, tensors[name]), layers))
    rows: dict[Any, int] = {}  # of a tensor of some layers: others may have it of another weight
    first_rows: dict[str, int] = {}
    by_name = {parameter.name: parameter for parameter in listed}
    for name in filter(by_name.__contains__, tensors):
        of = tensors[name], tuple(by_name[name].layers)
        first_rows[name] = rows.get(of, 0)
        assert not (first_rows[name] and "{expert}" in tensors[name]), "rows of several weights in each expert's tensor"
        rows[of] = first_rows[name] + by_name[name].shape[0]
    return [dataclasses.replace(parameter, first_row=first_rows[parameter.name]) for parameter in listed]


def stored_shapes(listed: Sequence[Parameter]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in listed:
        rows, *columns = parameter.shape
        for layer in parameter.layers:
            names = parameter.names(layer)
            for name in names:
                last = parameter.first_row + rows // len(names)
                shapes[name] = (max(last, shapes.get(name, (0,))[0]), *columns)
    return shapes
