"""The decoder's view of a trained model, whatever library it is written in: by reference, without device work."""

import importlib
from typing import Any

import equinox as eqx
from haliax import NamedArray

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig
from lockstep.models.llama import LlamaLMHeadModel, attention_and_mlp
from lockstep.models.registry import UnreadableModelError, class_name, has_reader, read_registered, register_reader
from lockstep.models.weight_sizes import check_weights
from lockstep.models.weights import WEIGHT_AXES, DecoderWeights, LayerWeights, haliax_axes
from lockstep.placement import on_one_mesh


def read_decoder(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    """The configuration and weights of a model, as references to the very arrays of the trainer.

    Launches nothing, so it may run where launches raise. What it returns may be given wherever a model is read, and is
    read again for nothing.

    Args:
        model: An instance of a class that a reader is registered for, or a ``(LlamaConfig, DecoderWeights)`` pair.

    Returns:
        The configuration, and the weights in the order of axes of `lockstep.models.weights`.

    Raises:
        UnreadableModelError: There is no reader for the class of ``model``, or it left a parameter out
            (`UnreadParameterError`).
        ConfigError: A weight has another size or order of axes than the configuration says, or should not be there, or
            is missing.

    Example:
        >>> config, weights = lockstep.models.read_decoder(model)
        >>> config == small, weights.embed is model.embed.array
        (True, True)
    """
    if not has_reader(type(model)) and (readers := _readers_of_library(type(model))):
        importlib.import_module(readers)
    config, weights = read_registered(model)
    check_weights(config, weights)
    return config, on_one_mesh(weights)


@register_reader(tuple, parameters=lambda pair: None)  # there is no model beside it
def _read_pair(model: tuple[Any, ...]) -> tuple[LlamaConfig, DecoderWeights]:
    match model:
        case (LlamaConfig() as config, DecoderWeights() as weights):
            return config, weights
    kinds = [class_name(type(item)) for item in model]
    alone = next((kind for kind, item in zip(kinds, model, strict=True) if has_reader(type(item))), None)
    fix = f"Pass the {alone} alone" if alone else "docs/your-trainer.md says how to make one"
    if any(kind.startswith("flax.nnx.") and kind.endswith(".GraphDef") for kind in kinds):
        fix = "Pass the model, flax.nnx.merge(graphdef, state), of a class with a reader (docs/your-trainer.md)"
    raise UnreadableModelError(
        f"a tuple of ({', '.join(kinds)}) cannot be read as a model; only a pair (LlamaConfig, DecoderWeights) can. "
        f"{fix}."
    )


@register_reader(LlamaLMHeadModel)
def _read_llama(model: LlamaLMHeadModel) -> tuple[LlamaConfig, DecoderWeights]:
    layer = model.layers.stacked
    layers = _parameters(LayerWeights, layer, *attention_and_mlp(layer))
    return model.config, DecoderWeights(layers=LayerWeights(**layers), **_parameters(DecoderWeights, model))


def _parameters(weights: type, *modules: eqx.Module) -> dict[str, Any]:
    """The arrays of a dataclass of weights from the modules that have parameters of their names."""
    arrays = {}
    for name in weights.__annotations__.keys() & WEIGHT_AXES.keys():
        module = next((module for module in modules if hasattr(module, name)), None)
        arrays[name] = _array(name, getattr(module, name, None))
    return arrays


def _array(name: str, parameter: NamedArray | None) -> Any:
    if parameter is None:
        return None
    shape, have, want = getattr(parameter.array, "shape", None), parameter.axis_names, haliax_axes(name)
    if shape is None or len(shape) != len(have):  # haliax would print the array
        raise ConfigError(
            f"the parameter {name} has axes {have}, and its array is {f'of shape {shape}' if shape else 'missing'}. "
            "Pass the whole model: of one copied by jax.pmap one copy (jax.tree.map(lambda array: array[0], model)), "
            "of a partitioned one equinox.combine of its parts."
        )
    assert have == want, f"the parameter {name} has axes {have}, the decoder reads {want}"
    return parameter.array


READERS = {"levanter": "lockstep.models.levanter_reader", "tunix": "lockstep.models.tunix_reader"}
"""The module that reads the models of a library, imported on first use."""


def _readers_of_library(cls: type) -> str | None:
    """The module that reads the class: one of a library's own, or one that extends such a class."""
    libraries = (base.__module__.split(".")[0] for base in cls.__mro__)
    return next((READERS[library] for library in libraries if library in READERS), None)
