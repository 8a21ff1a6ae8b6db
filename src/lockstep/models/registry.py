"""The readers of model classes, by class; `lockstep.models.reader` asks them, whoever wrote them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from jaxtyping import PyTree

from lockstep.models.config import LlamaConfig
from lockstep.models.parameters import UnreadableModelError, check_all_read
from lockstep.models.weights import DecoderWeights

Reader = Callable[[Any], tuple[LlamaConfig, DecoderWeights]]

PAGES: Final[dict[str, tuple[str, str]]] = {
    "levanter": ("a Levanter model", "levanter"),
    "tunix": ("a Tunix model", "tunix"),
    "flax": ("a Flax model", "your-trainer"),
    "bonsai": ("a Bonsai model", "your-trainer"),
    "easydel": ("an EasyDeL model", "your-trainer"),
    "maxtext": ("a MaxText model", "your-trainer"),
}
"""What a model of a library is called, and the page in ``docs`` that says how it is read, by its top-level package."""


def register_reader(
    cls: type, *, parameters: Callable[[Any], PyTree] = lambda model: model, ignore: Sequence[str] = ()
) -> Callable[[Reader], Reader]:
    """Decorator that makes a function the reader of a model class and its subclasses.

    A parameter of the model that the reader leaves out is an error, so that no sample is that of a model without it.

    Args:
        cls: The model class.
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
            config, weights = reader(model)
            check_all_read(parameters(model), weights, ignore=ignore)
            return config, weights

        read_registered.register(cls)(checked)
        return reader

    return register


@functools.singledispatch
def read_registered(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    """What the registered reader of the class of ``model`` returns.

    Args:
        model: An instance of a class that a reader is registered for.

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
        found = PAGES.get(base.__module__.split(".")[0].lower())
        if found is not None:
            return f"docs/{found[1]}.md says how {found[0]} is read"
    return "docs/your-trainer.md says how"
