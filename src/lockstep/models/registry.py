"""The readers of model classes, by class, and whether a reader has read every parameter of a model."""

import fnmatch
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from lockstep.errors import LockstepError
from lockstep.models.config import LlamaConfig
from lockstep.models.weights import DecoderWeights
from lockstep.placement import sources
from lockstep.printable import get_logger

log = get_logger(__name__)

NAMED_AT_MOST = 8
"""The number of parameters that an error names."""


class UnreadableModelError(LockstepError, TypeError):
    """A model that no registered reader can read: names its class and the supported ones.

    Example:
        >>> lockstep.models.read_decoder("no model")
        Traceback (most recent call last):
            ...
        lockstep.models.registry.UnreadableModelError: a model of class builtins.str cannot be read; supported are ...
    """


class UnreadParameterError(UnreadableModelError):
    """A model has parameters that its reader did not read, so that samples would be those of another model.

    Example:
        >>> lockstep.models.check_all_read({"bias": jax.numpy.ones(2)}, lockstep.models.read_decoder(model)[1])
        Traceback (most recent call last):
            ...
        lockstep.models.registry.UnreadParameterError: 1 of the 1 parameters of a builtins.dict are read by no ...
    """


def named_parameters(model: PyTree) -> dict[str, Any]:
    """The parameters of a model by their paths, as ``layers.0.q.kernel``; nothing is launched.

    A parameter is an array of floats, or of integers of at most 8 bits (a quantized one). The random state, caches and
    intermediates of a Flax NNX model are none.

    Args:
        model: Any pytree of arrays, shape structs or tracers, such as an equinox or Flax NNX module or a dict.

    Returns:
        The arrays themselves; none where ``model`` is no pytree.

    Example:
        >>> "final_norm" in lockstep.models.named_parameters(model)
        True
    """
    nnx: Any = sys.modules.get("flax.nnx")
    variable: Any = () if nnx is None else nnx.Variable
    boxes: Any = (hax.NamedArray,) if nnx is None else (hax.NamedArray, variable)
    state = () if nnx is None else (nnx.RngState, nnx.Cache, nnx.Intermediate)
    parameters = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, boxes)):
        if isinstance(leaf, state):
            continue
        value = leaf.get_value() if isinstance(leaf, variable) else leaf
        value = value.array if isinstance(value, hax.NamedArray) else value
        for inner, array in jax.tree_util.tree_leaves_with_path(value):
            if _is_parameter(array):
                parameters[jax.tree_util.keystr((*path, *inner), simple=True, separator=".")] = array
    return parameters


def check_all_read(model: PyTree, weights: PyTree, *, ignore: Sequence[str] = ()) -> None:
    """Refuse weights that lack a parameter of the model: an adapter, an expert, a bias.

    Every registered reader is checked like this, and `from_names`; call it where a pair of configuration and weights is
    made without either.

    Args:
        model: The model, or the pytree of its parameters.
        weights: The `DecoderWeights` that were read of it.
        ignore: Names of parameters that the forward pass does not use, or patterns of such: ``value_head.*``.

    Raises:
        UnreadParameterError: A parameter is in none of the weights; the error names it.

    Example:
        >>> config, weights = lockstep.models.read_decoder(model)
        >>> lockstep.models.check_all_read(model, weights)
    """
    parameters = named_parameters(model)
    if not parameters:
        return
    read = {id(array) for array in jax.tree.leaves(sources(weights))}
    unread = [
        name
        for name, array in parameters.items()
        if id(array) not in read and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if unread:
        raise UnreadParameterError(_text(type(model), unread, len(parameters)))


def _text(cls: type, unread: Sequence[str], total: int) -> str:
    rest = f" and {len(unread) - NAMED_AT_MOST} more" if len(unread) > NAMED_AT_MOST else ""
    words = " ".join(unread).lower()
    fix = "Read them"
    if "lora" in words or "adapter" in words:
        fix = "Merge adapters with lockstep.models.merge_lora"
    elif "expert" in words or "moe" in words:
        fix = (
            "Experts are router, expert_gate, expert_up and expert_down, with experts= in the configuration: read them"
        )
    return (
        f"{len(unread)} of the {total} parameters of a {cls.__module__}.{cls.__qualname__} are read by no field of the "
        f"decoder's weights: {', '.join(unread[:NAMED_AT_MOST])}{rest}. Samples would be those of a model without "
        f"them. {fix}, or, where the forward pass does not use them, name them in ignore= of register_reader, "
        "from_names or check_all_read."
    )


def _is_parameter(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        return False
    return jnp.issubdtype(dtype, jnp.inexact) or (jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8)


Reader = Callable[[Any], tuple[LlamaConfig, DecoderWeights]]

PAGES: Final[dict[str, tuple[str, str]]] = {
    "levanter": ("a Levanter model", "levanter"),
    "tunix": ("a Tunix model", "tunix"),
    "flax": ("a Flax model", "your-trainer"),
    "bonsai": ("a Bonsai model", "your-trainer"),
    "easydel": ("an EasyDeL model", "your-trainer"),
    "maxtext": ("a MaxText model", "your-trainer"),
}
"""The name of a library's model, and the page in ``docs`` that says how it is read, by its top-level package."""


def register_reader(
    cls: type, *, parameters: Callable[[Any], PyTree] = lambda model: model, ignore: Sequence[str] = ()
) -> Callable[[Reader], Reader]:
    """Decorator that makes a function the reader of a model class and its subclasses.

    A parameter of the model that the reader leaves out is an error, so that no sample is that of a model without it.

    Args:
        parameters: Where the parameters of a model are, as a pytree; needed where the model is not one itself.
        ignore: Names of parameters that the forward pass does not use, or patterns of such: ``value_head.*``.

    Returns:
        The decorator. The function takes the model and returns what `read_decoder` returns; it may not launch anything.

    Example:
        >>> class MyModel:
        ...     inner = model
        >>> @lockstep.models.register_reader(MyModel)
        ... def read(mine):
        ...     return lockstep.models.read_decoder(mine.inner)
        >>> lockstep.models.read_decoder(MyModel())[0].num_layers
        2
    """

    def register(reader: Reader) -> Reader:
        @functools.wraps(reader)
        def checked(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
            name = f"the reader {getattr(reader, '__name__', reader)} of a {class_name(type(model))}"
            try:
                pair: object = reader(model)
            except LockstepError:
                raise
            except Exception as error:
                raise UnreadableModelError(f"{name} raised {type(error).__name__}: {error}. Correct it.") from error
            match pair:
                case (LlamaConfig() as config, DecoderWeights() as weights):
                    own = parameters(model)
                case _:
                    kinds = [class_name(type(item)) for item in (pair if isinstance(pair, tuple) else [pair])]
                    raise UnreadableModelError(
                        f"{name} returned {', '.join(kinds)}; it must return a pair (LlamaConfig, DecoderWeights). "
                        "Correct it."
                    )
            if own is model and not named_parameters(model):
                _warn_of_no_parameters(class_name(type(model)))
            check_all_read(own, weights, ignore=ignore)
            return config, weights

        read_registered.register(cls)(checked)
        return reader

    return register


@functools.cache
def _warn_of_no_parameters(cls: str) -> None:
    log.warning(
        "a %s is no pytree with parameters, so it is not known whether its reader left one out. Give register_reader "
        "parameters=, a function from a model to a pytree of its parameters.",
        cls,
    )


@functools.singledispatch
def read_registered(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    """The weights that the registered reader of the class of ``model`` returns.

    Returns:
        The configuration, and the weights in the order of axes of `lockstep.models.weights`.

    Raises:
        UnreadableModelError: There is no reader for the class of ``model``, or it left a parameter out.
    """
    supported = ", ".join(sorted(class_name(cls) for cls in registered_classes() if cls is not tuple))
    raise UnreadableModelError(
        f"a model of class {class_name(type(model))} cannot be read; supported are {supported}, their subclasses, and "
        "a pair (LlamaConfig, DecoderWeights). Pass one of these, or register a reader for your class with "
        f"lockstep.models.register_reader: {_page(type(model))}."
    )


def has_reader(cls: type) -> bool:
    """Whether a reader is registered for the class or a class that it extends."""
    return read_registered.dispatch(cls) is not read_registered.dispatch(object)


def registered_classes() -> Iterator[type]:
    """The classes that readers are registered for."""
    return (cls for cls in read_registered.registry if cls is not object)


def class_name(cls: type) -> str:
    """The name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _page(cls: type) -> str:
    """The page that says how a model of this class is read: that of its library, or else of the closest base."""
    for base in cls.__mro__:
        library = PAGES.get(base.__module__.split(".")[0].lower())
        if library is not None:
            return f"docs/{library[1]}.md says how {library[0]} is read"
    return "docs/your-trainer.md says how"
