"""Weights read through a table of parameter names: what most models need of a reader."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from jaxtyping import PyTree

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError
from lockstep.models.low_rank import merge_lora
from lockstep.models.registry import check_all_read, class_name, named_parameters
from lockstep.models.weights import (
    LINEAR_WEIGHTS,
    MLP_WEIGHTS,
    SPARSE_WEIGHTS,
    STACKED,
    WEIGHT_AXES,
    DecoderWeights,
    LayerWeights,
)
from lockstep.placement import Pick, axis_groups, view

type Entry = str | tuple[str] | tuple[str, str] | tuple[str, str, Mapping[str, Pick]]
"""The name of a parameter, with ``{}`` for the number of the layer; how its axes correspond to the weight's, as `view`
takes it, None or absent where they are the same; and what to take of axes, and sizes, as `view` takes them."""

OUTPUTS: Final = frozenset({"o", "down"})
"""The weights whose last axis is the output of their layer; of the other linear layers the first is the input."""

MLPS: Final = (("up", "down"), ("router", "expert_gate", "expert_up", "expert_down"))
"""The weights of which a model has the first, an MLP, or the second, experts."""
HEADS: Final = ("q", "k", "v")
"""The weights of attention that a model has whose table has no row for another kind of attention."""
OTHER_ATTENTION: Final = LINEAR_WEIGHTS | {"gated_q", "q_b", "kv_a"}
OPTIONAL: Final = frozenset(
    field.name for cls in (DecoderWeights, LayerWeights) for field in dataclasses.fields(cls) if field.default is None
) - {name for names in (HEADS, *MLPS) for name in names}
"""The weights that a model may lack although its table has a row for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraNames:
    """The names of the two factors of an adapter in a library.

    The factor ``a`` has the inputs of the layer and then the rank, ``b`` the rank and then the outputs, each in the
    order of the weight's axes; several inputs or outputs may be flattened into one axis.

    Args:
        scale: The factor of their product, ``alpha / rank`` in most libraries.
        a: The name of the first factor, made of that of the weight.
        b: The name of the second factor.

    Example:
        >>> lockstep.models.LoraNames(scale=16 / 8).a.format("layers.0.q.kernel")
        'layers.0.q.kernel_lora_a'
    """

    scale: float
    a: str = "{}_lora_a"
    b: str = "{}_lora_b"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class NamesReader:
    """Reads the weights of a model through a table of names; made by `from_names`."""

    table: Mapping[str, Entry]
    lora: LoraNames | None
    ignore: tuple[str, ...]

    def __call__(self, model: PyTree) -> DecoderWeights:
        """The weights, by reference; nothing is launched.

        Args:
            model: The model, or the pytree of its parameters, as `named_parameters` takes it.

        Raises:
            ConfigError: A parameter that the table names is not there, or its axes do not fit.
            UnreadParameterError: A parameter of the model is not in the table.
        """
        by_name = named_parameters(model)
        if not by_name:
            raise ConfigError(
                f"a {class_name(type(model))} is no pytree with parameters. Pass one, such as a plain dict of arrays."
            )
        read = {name: self._weight(name, entry, by_name) for name, entry in self.table.items()}
        layers = LayerWeights(**{name: weight for name, weight in read.items() if name in STACKED})
        weights = DecoderWeights(layers=layers, **{name: w for name, w in read.items() if name not in STACKED})
        check_all_read(model, weights, ignore=self.ignore)
        return weights

    def _weight(self, weight: str, entry: Entry, by_name: Mapping[str, Any]) -> Any:
        name, pattern, picks = (*((entry,) if isinstance(entry, str) else entry), None, None)[:3]
        by_layer = "{}" in name
        partly = all(name_ in self.table for name_ in ("up", "router")) and weight in (*MLP_WEIGHTS, *SPARSE_WEIGHTS)
        names = _of_layers(name, by_name, partly=partly) if by_layer else [name] * (name in by_name)
        if not names:
            if weight in OPTIONAL or (weight in HEADS and self.table.keys() & OTHER_ATTENTION):
                return None
            raise _missing(weight, name.format(0) if by_layer else name, by_name)
        arrays = [by_name[parameter] for parameter in names]
        pattern = pattern or _same(weight, arrays[0], by_layer)
        factors = [] if self.lora is None else [_factors(parameter, self.lora, by_name) for parameter in names]
        if not any(factors):
            try:
                return view(arrays if by_layer else arrays[0], pattern, **(picks or {}))
            except ConfigError as error:
                raise ConfigError(f"the row {weight!r} ({name}): {error}") from error
        if not all(factors):
            bare = names[factors.index(())]
            raise ConfigError(
                f"{bare} has no LoRA factors and another layer of {name} has. Give every layer an adapter or none, or "
                "read the weight with lockstep.models.merge_lora."
            )
        assert self.lora is not None
        parts = [arrays, *([pair[side] for pair in factors] for side in (0, 1))]
        weights, a, b = (part if by_layer else part[0] for part in parts)
        return merge_lora(
            weights,
            a,
            b,
            _with_factors(weight, pattern, *(part[0].ndim for part in parts)),
            scale=self.lora.scale,
            **(picks or {}),
        )


def from_names(table: Mapping[str, Entry], *, lora: LoraNames | None = None, ignore: Sequence[str] = ()) -> NamesReader:
    """Make a reader of weights from a table of parameter names, as of Flax NNX models or of dicts of arrays.

    A weight that a model may lack, such as ``lm_head`` or ``q_norm``, is None where the model has no parameter of its
    name. A table with rows for an MLP and for experts is that of a model whose layers have one or the other. A
    parameter that is in no row is an error, so that a name that is wrong cannot go unnoticed.

    Args:
        table: For each field of `DecoderWeights` and `LayerWeights` the name of its parameter, ``"embed.embedding"``
            or ``"layers.{}.q.kernel"``; where the axes differ a tuple with a pattern and picks, as `view` takes them:
            ``("layers.{}.kv.kernel", "two embed heads head -> embed heads head", {"two": 0})``.
        lora: Where the factors of adapters are; None for a model that has none.
        ignore: Names of parameters that the forward pass does not use, or patterns of such: ``value_head.*``.

    Returns:
        The function of the model, or of the pytree of its parameters, that returns its `DecoderWeights`.

    Raises:
        ConfigError: A row is for a weight that the decoder does not have, or a weight that every model has has none.

    Example:
        >>> layers = {name: jax.numpy.ones((2, 4, 4)) for name in ("q", "k", "v", "o", "up", "down")}
        >>> params = {"wte": jax.numpy.ones((8, 4)), "norm": jax.numpy.ones(4), "layers": layers}
        >>> table = {"embed": "wte", "final_norm": "norm"} | {name: f"layers.{name}" for name in layers}
        >>> lockstep.models.from_names(table)(params).layers.q is layers["q"]
        True
    """
    for weight in table:
        if weight not in WEIGHT_AXES:
            raise ConfigError(
                f"the table has a row {weight!r}; the decoder has no such weight. Use one of {', '.join(WEIGHT_AXES)}."
            )
    either = [name for names in MLPS for name in names]
    either += HEADS if table.keys() & OTHER_ATTENTION else ()
    needed = [name for name in WEIGHT_AXES if name not in (*OPTIONAL, *either, *table)]
    mlp, experts = ([name for name in names if name not in table] for names in MLPS)
    needed += mlp if len(mlp) <= len(experts) else experts
    if needed:
        raise ConfigError(f"the table has no row for {', '.join(needed)}, which every model has. Add them.")
    return NamesReader(table=dict(table), lora=lora, ignore=tuple(ignore))


def _of_layers(name: str, by_name: Mapping[str, Any], *, partly: bool) -> list[str]:
    """The parameters of all layers from the first on, or of ``some`` layers."""
    every = [name.format(layer) for layer in range(len(by_name))]
    return (
        [parameter for parameter in every if parameter in by_name]
        if partly
        else [*takewhile(by_name.__contains__, every)]
    )


def _same(weight: str, array: Any, by_layer: bool) -> str:
    """The pattern of an array that has the weight's axes; those of heads may be flattened."""
    axes = [axis for axis in WEIGHT_AXES[weight] if not (by_layer and axis == "layer")]
    if array.ndim < len(axes):  # Heads are the middle ones, or all but the layer.
        heads = [axis for axis in axes if axis in ("kv_head", "group", "head")]
        first, keep = axes.index(heads[0]), len(heads) - (len(axes) - array.ndim)
        axes[first : first + len(heads)] = heads[: max(keep, 1)]
    return f"{' '.join(axes)} -> {' '.join(axes)}"


def _factors(name: str, lora: LoraNames, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
    a, b = lora.a.format(name), lora.b.format(name)
    return (by_name[a], by_name[b]) if a in by_name and b in by_name else ()


def _with_factors(weight: str, pattern: str, ndim: int, a_ndim: int, b_ndim: int) -> str:
    """The pattern of `merge_lora` from that of `view`: which axes are inputs follows from the weight."""
    groups, want = axis_groups(pattern.partition("->")[0]), pattern.partition("->")[2].split()
    assert len(groups) == ndim, f"{pattern} of a weight with {ndim} axes"
    stacked = groups.index(("layer",)) if ("layer",) in groups else None
    have = [group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups]
    inner = [name for name in want if name != "layer"]
    inputs = inner[:-1] if weight in OUTPUTS else inner[:1]
    a = [name for name, group in zip(have, groups, strict=True) if set(group) & set(inputs)]
    b = [name for name in have if name not in a and name != "layer"]

    def side(names: list[str], axes: int) -> list[str]:
        return [f"({' '.join(names)})"] if axes == 1 and len(names) > 1 else names

    left = [*side(a, a_ndim - 1 - (stacked is not None)), "rank"]
    right = ["rank", *side(b, b_ndim - 1 - (stacked is not None))]
    for axes in (left, right):
        if stacked is not None:
            axes.insert(stacked, "layer")
    return f"{' '.join(have)}, {' '.join(left)}, {' '.join(right)} -> {' '.join(want)}"


def _missing(weight: str, name: str, by_name: Mapping[str, Any]) -> ConfigError:
    near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.3) or sorted(by_name)[:3]
    return ConfigError(
        f"the table says that {weight} is {name}, and the model's {len(by_name)} parameters have none of that name; "
        f"near are {', '.join(near) or 'none'}. Correct the row {weight!r}."
    )
