"""Classes and functions of a user's own, by ``module:name``."""

import contextlib
import importlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from lockstep.errors import ConfigError
from lockstep.printable import ERROR_CHARACTERS, error_text, get_logger

log = get_logger(__name__)

_LIBRARIES: Final = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(__file__),
)
"""Directories of code that is not the user's."""


def own_error_text(error: BaseException, length: int = ERROR_CHARACTERS) -> str:
    """The `error_text` of what a user's own code raised, and the line of that code, where a stack has one."""
    place = next(_own_places(error), "")
    return error_text(error, length - len(place)) + place


def _own_places(error: BaseException) -> Iterator[str]:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *_LIBRARIES)):
            yield f" ({os.path.basename(frame.filename)}, line {frame.lineno})"
    for inner in (*getattr(error, "exceptions", ()), error.__cause__):
        if inner is not None:
            yield from _own_places(inner)


def working_directory() -> str:
    """The working directory, see `go_back`; empty where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def go_back(directory: str, code: str) -> None:
    """Return to a working directory that a user's code has left, with a warning: the run's own paths start there.

    Args:
        directory: The one before, as `working_directory` gave it.
        code: What may have left it, in the words of the warning.
    """
    left = working_directory()
    if directory and left != directory:
        with contextlib.suppress(OSError):  # removed since
            os.chdir(directory)
        log.warning(
            "%s changed the working directory of the whole process to %r, and lockstep has changed it back to %r. Use "
            "absolute paths in it, and cwd= of subprocess, instead of os.chdir",
            code, left, directory,
        )  # fmt: skip


def load_object(name: str, key: str, kind: type | None = None) -> Any:
    """Import the module of ``module:name`` and return what has that name in it.

    Args:
        name: The module and the name, with a colon between them. Every host must have the module, beside the
            configuration or on ``PYTHONPATH``.
        what: The key or the thing that it is for, in the words of an error.
        kind: The class that it must be of; None: anything that can be called.

    Raises:
        ConfigError: The module cannot be imported, or has nothing of that kind by that name.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ConfigError(
            f"{key} is {name!r}; one of your own is module:name, such as my_module:{attribute or 'name'}."
        )
    path = module_name.strip().removesuffix(".py")
    dotted = os.path.basename(path) if path.startswith("/") else re.sub("/+", ".", path).strip(".")
    if (dotted, attribute.strip()) != (module_name, attribute):
        raise ConfigError(
            f"{key} is {name!r}; it must be module:name, no path. Write {dotted}:{attribute.strip()}, and put the "
            "module beside the configuration, or its directory on PYTHONPATH, on every host."
        )
    directory = working_directory()
    try:
        module = importlib.import_module(module_name)
        loaded = getattr(module, attribute, None)
    except (Exception, SystemExit) as error:  # importing runs the module's own code
        text = own_error_text(error)
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key} {name!r}: module {module_name!r} could not be imported ({text}). Check the name, and put the "
                "module beside the configuration, or its directory on PYTHONPATH, on every host."
            ) from error
        raise ConfigError(
            f"{key} {name!r}: module {module_name!r} was found, but importing it failed with {text}. Correct the "
            "module, or install what it needs, on every host."
        ) from error
    finally:
        go_back(directory, f"module {module_name!r}")
    if not (callable(loaded) if kind is None else isinstance(loaded, kind)):
        kind_name = "function" if kind is None else kind.__name__
        raise ConfigError(
            f"{key} {name!r}: module {module_name!r} has no {kind_name} {attribute!r}. Check the name, and that the "
            f"module is yours: it came from {getattr(module, '__file__', 'Python itself')}."
        )
    return loaded


def modules_beside(config: str, text: str) -> list[str]:
    """Return the paths of modules, files and packages, that lie beside a configuration which names them.

    Args:
        text: What it says, and the command line: all that may have ``module:name``.
    """
    names = {reference.partition(".")[0] for reference in re.findall(r"([A-Za-z_][\w.]*):[A-Za-z_]", text)}
    paths = [Path(config).parent / place for name in sorted(names) for place in (f"{name}.py", name)]
    return [str(path) for path in paths if path.is_file() and path.suffix or (path / "__init__.py").is_file()]


class _Registry(Protocol):
    @classmethod
    def get_choice_class(cls, name: str) -> Any: ...

    @classmethod
    def get_choice_name(cls, subcls: type) -> str: ...


class OpenRegistry:
    """Makes ``type: module:Name`` a choice of a draccus registry: a subclass in a module of the user's.

    It comes before the registry in the bases of a configuration: ``class TrackerConfig(OpenRegistry, PluginRegistry)``.
    """

    @classmethod
    def get_choice_class(cls, name: str) -> Any:
        """Return the class of a name; a module of the user's is imported.

        Args:
            name: The ``type``, one that is registered or ``module:Name``.

        Raises:
            ConfigError: There is no such module, or the name in it is not that of such a class.
            KeyError: There is no such choice.
        """
        if not isinstance(name, str) or ":" not in name:
            registry: _Registry = super()  # type: ignore[assignment]  # the next base
            return registry.get_choice_class(name)
        loaded = load_object(name, "type")
        if not (isinstance(loaded, type) and issubclass(loaded, cls)):
            raise ConfigError(f"type {name!r} is not a subclass of {cls.__name__}. Derive it from that class.")
        if "__init__" in vars(loaded) and "__dataclass_fields__" not in vars(loaded):
            raise ConfigError(
                f"type {name!r} is no dataclass: {loaded.__name__} has an __init__ of its own, which is given no keys. "
                "Make the arguments fields, and put @dataclasses.dataclass(kw_only=True) before the class."
            )
        return loaded

    @classmethod
    def get_choice_name(cls, subcls: type) -> str:
        """Return the ``type`` of a class.

        Raises:
            ValueError: It is the registry itself.
        """
        try:
            registry: _Registry = super()  # type: ignore[assignment]  # the next base
            return registry.get_choice_name(subcls)
        except ValueError:
            if OpenRegistry in subcls.__bases__:
                raise
            return f"{subcls.__module__}:{subcls.__qualname__}"
