"""The readers of model classes, by class; `lockstep.models.reader` asks them, whoever wrote them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.errors import LockstepError
from lockstep.models.config import LlamaConfig
from lockstep.models.weights import DecoderWeights

Reader = Callable[[Any], tuple[LlamaConfig, DecoderWeights]]


class UnreadableModelError(LockstepError, TypeError):
    """A model that no registered reader can read: names its class and the supported ones.

    Example:
        >>> lockstep.models.read_decoder("no model")
        Traceback (most recent call last):
            ...
        lockstep.models.registry.UnreadableModelError: a model of class builtins.str cannot be read; supported are ...
    """


def register_reader(cls: type) -> Callable[[Reader], Reader]:
    """Decorator that makes a function the reader of a model class and its subclasses.

    Args:
        cls: The model class.

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
    return read_registered.register(cls)


@functools.singledispatch
def read_registered(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    """What the registered reader of the class of ``model`` returns.

    Args:
        model: An instance of a class that a reader is registered for.

    Returns:
        The configuration, and the weights in the order of axes of `lockstep.models.weights`.

    Raises:
        UnreadableModelError: There is no reader for the class of ``model``.
    """
    supported = ", ".join(sorted(class_name(cls) for cls in registered_classes() if cls is not tuple))
    raise UnreadableModelError(
        f"a model of class {class_name(type(model))} cannot be read; supported are {supported}, their subclasses, and "
        "a pair (LlamaConfig, DecoderWeights). Pass one of these, or register a reader for your class with "
        "lockstep.models.register_reader."
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
