"""How the decoder reads a trained model, whatever library it is written in: by reference, without device work."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from haliax import NamedArray

from lockstep.errors import LockstepError
from lockstep.models.config import LlamaConfig
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.weights import DecoderWeights, LayerWeights

Reader = Callable[[Any], tuple[LlamaConfig, DecoderWeights]]


class UnreadableModelError(LockstepError, TypeError):
    """A model that no registered reader can read: names its class and the supported ones."""


@functools.singledispatch
def read_decoder(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    """The configuration and weights of a model, as references to the very arrays that the trainer holds.

    Launches nothing, so it may run where launches raise.

    Args:
        model: an instance of a class that a reader is registered for, or a ``(LlamaConfig, DecoderWeights)`` pair.

    Returns:
        The configuration, and the weights in the order of axes of `lockstep.models.weights`.

    Raises:
        UnreadableModelError: there is no reader for the class of ``model``.
    """
    if _is_levanter(model) and "lockstep.models.levanter_reader" not in sys.modules:
        importlib.import_module("lockstep.models.levanter_reader")
        return read_decoder(model)
    supported = ", ".join(sorted(_name(cls) for cls in read_decoder.registry if cls not in (object, tuple)))
    raise UnreadableModelError(
        f"a model of class {_name(type(model))} cannot be read; supported are {supported}, their subclasses, and a "
        "pair (LlamaConfig, DecoderWeights). Pass one of these, or register a reader for your class with "
        "lockstep.models.register_reader."
    )


def register_reader(cls: type) -> Callable[[Reader], Reader]:
    """Decorator that makes a function the reader of a model class and its subclasses.

    Args:
        cls: the model class.

    Returns:
        The decorator. The function takes the model and returns what `read_decoder` returns; it may not launch anything.
    """
    return read_decoder.register(cls)


@register_reader(tuple)
def _read_pair(model: tuple[Any, ...]) -> tuple[LlamaConfig, DecoderWeights]:
    match model:
        case (LlamaConfig() as config, DecoderWeights() as weights):
            return config, weights
    kinds = ", ".join(_name(type(item)) for item in model)
    raise UnreadableModelError(
        f"a tuple of ({kinds}) cannot be read as a model; only a pair (LlamaConfig, DecoderWeights) can. Pass such a "
        "pair."
    )


@register_reader(LlamaLMHeadModel)
def _read_llama(model: LlamaLMHeadModel) -> tuple[LlamaConfig, DecoderWeights]:
    layer = model.layers.stacked
    attention, mlp = layer.attention, layer.mlp
    head = ("kv_head", "q_heads_per_group", "head_size")
    kv_head = ("kv_head", "head_size")
    layers = LayerWeights(
        attn_norm=_optional(layer.attn_norm, "layer", "embed"),
        attn_post_norm=_optional(layer.attn_post_norm, "layer", "embed"),
        mlp_post_norm=_optional(layer.mlp_post_norm, "layer", "embed"),
        q=_array(attention.q, "layer", "embed", *head),
        k=_array(attention.k, "layer", "embed", *kv_head),
        v=_array(attention.v, "layer", "embed", *kv_head),
        o=_array(attention.o, "layer", *head, "embed"),
        mlp_norm=_optional(layer.mlp_norm, "layer", "embed"),
        gate=_optional(mlp.gate, "layer", "embed", "mlp"),
        up=_array(mlp.up, "layer", "embed", "mlp"),
        down=_array(mlp.down, "layer", "mlp", "embed"),
        q_bias=_optional(attention.q_bias, "layer", *head),
        k_bias=_optional(attention.k_bias, "layer", *kv_head),
        v_bias=_optional(attention.v_bias, "layer", *kv_head),
        q_norm=_optional(attention.q_norm, "layer", "head_size"),
        k_norm=_optional(attention.k_norm, "layer", "head_size"),
        q_wide_norm=_optional(attention.q_wide_norm, "layer", *head),
        k_wide_norm=_optional(attention.k_wide_norm, "layer", *kv_head),
        xielu_p=_optional(mlp.xielu_p, "layer"),
        xielu_n=_optional(mlp.xielu_n, "layer"),
        xielu_beta=_optional(mlp.xielu_beta, "layer"),
        xielu_eps=_optional(mlp.xielu_eps, "layer"),
    )
    weights = DecoderWeights(
        embed=_array(model.embed, "vocab", "embed"),
        embed_norm=_optional(model.embed_norm, "embed"),
        layers=layers,
        final_norm=_array(model.final_norm, "embed"),
        lm_head=_optional(model.lm_head, "embed", "vocab"),
    )
    return model.config, weights


def _array(named: NamedArray, *axes: str) -> Any:
    names = tuple(axis.name for axis in named.axes)
    assert names == axes, f"a parameter has axes {names}, the decoder reads {axes}"
    return named.array


def _optional(named: NamedArray | None, *axes: str) -> Any:
    return None if named is None else _array(named, *axes)


def _is_levanter(model: Any) -> bool:
    """Whether the class is Levanter's or extends one of its; its readers are imported on first use."""
    return any(cls.__module__.split(".")[0] == "levanter" for cls in type(model).__mro__)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
