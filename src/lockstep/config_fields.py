"""Checks of the fields of a configuration: they hold the same whether YAML or Python gives it."""

import collections.abc
import dataclasses
import functools
import os
import types
import typing
from typing import Annotated, Any, Final

from lockstep.errors import ConfigError

_PATH: Final = "a path or a URL"
_NAMES: Final[dict[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Annotated: _PATH,
    list: "a list",
    tuple: "a list",
    typing.Literal: "one of its choices",
    types.NoneType: "null",
}
"""Values of a field, by the origin of its type. A value of a field that has any other type is not looked at."""
type _Kinds = tuple[Any, ...]

FilePath = Annotated[str, _PATH]
"""The type of a field that has a local path, or a URL where its docstring says so: ``~`` is the user's home."""


def check_fields(config: Any, block: str = "") -> None:
    """Bring the fields of a configuration into the form that YAML gives them, or refuse them; `__post_init__` calls it.

    A scalar of NumPy becomes a number, a `Path` its text, a column of NumPy, pandas or ``datasets`` and a
    ``ListConfig`` of omegaconf a list; in a `FilePath` the home directory takes the place of ``~``.

    Args:
        block: The key of the configuration itself, with a dot at its end; "" for that of a command.

    Raises:
        ConfigError: A value is no choice of a `Literal`, or no number, text or list where the field has one; the
            message names the field, the value and what it must be.
    """
    cls: Any = type(config)
    for name, kinds in _kinds_of_fields(cls).items():
        before = getattr(config, name)
        value = _checked(before, kinds, f"{block}{name}")
        if value is not before:
            object.__setattr__(config, name, value)


@functools.cache
def _kinds_of_fields(cls: type) -> dict[str, _Kinds]:
    """The types of each field; none of what a user's class annotates with a text that has no meaning here."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:
        hints = {}
    return {field.name: _members(hints[field.name]) for field in dataclasses.fields(cls) if field.name in hints}


def _members(kind: Any) -> _Kinds:
    """The members of a union, and of unions in it; any other type alone."""
    if isinstance(kind, typing.TypeAliasType):
        return _members(kind.__value__)
    if _origin(kind) in (typing.Union, types.UnionType):
        return tuple(inner for member in typing.get_args(kind) for inner in _members(member))
    return (kind,)


def _origin(kind: Any) -> Any:
    """``list`` of ``list[int]``; of a type without arguments the type."""
    origin: Any = typing.get_origin(kind)
    return kind if origin is None else origin


def _checked(value: Any, kinds: _Kinds, name: str) -> Any:
    choices = [choice for kind in kinds if _origin(kind) is typing.Literal for choice in typing.get_args(kind)]
    origins = set(map(_origin, kinds))
    value = _plain(value, origins)
    if choices and origins <= {typing.Literal, types.NoneType}:
        known = [*choices, *([None] if types.NoneType in origins else [])]
        if value not in known:
            shown = ", ".join("null" if choice is None else str(choice) for choice in known)
            raise ConfigError(f"{name} is {value!r}; it must be one of {shown}. Correct it.")
    elif isinstance(value, str) and FilePath in kinds:
        return _expanded(value, name)
    elif value is not None and value not in choices and origins <= _NAMES.keys() and not origins & _accepted(value):
        names = dict.fromkeys(text for kind, text in _NAMES.items() if kind in origins)
        fix = f"Use [{value!r:.200}]" if isinstance(value, str) and list in origins else "Correct it"
        raise ConfigError(f"{name} is {value!r:.200}; it must be {' or '.join(names)}. {fix}.")
    elif isinstance(value, list | tuple):
        for kind in kinds:
            if _origin(kind) in (list, tuple) and (inner := typing.get_args(kind)):
                members = [_checked(item, _members(inner[0]), f"{name}[{i}]") for i, item in enumerate(value)]
                unchanged = all(new is old for new, old in zip(members, value, strict=True))
                return value if unchanged else type(value)(members)
    return value


def _accepted(value: Any) -> set[Any]:
    """The origins of types that may have a value."""
    if isinstance(value, bool):
        return {bool}
    if isinstance(value, int):
        return {int, float}
    return next((kinds for kinds in ({float}, {str}, {list, tuple}) if isinstance(value, tuple(kinds))), set())


def _plain(value: Any, origins: set[Any]) -> Any:
    """A value of another library as Python's own, where the field can have that."""
    if value is None or isinstance(value, bool | int | float | str | list | tuple | dict) and _is_python(value):
        return value
    if isinstance(value, os.PathLike) and origins & {str, Annotated}:
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    if origins & {list, tuple}:
        if hasattr(value, "tolist"):
            return value.tolist()
        if isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes | list | tuple):
            return [_plain(item, {list, dict}) for item in value]
    if isinstance(value, collections.abc.Mapping) and not isinstance(value, dict) and dict in origins:
        return {key: _plain(inner, {list, dict}) for key, inner in value.items()}
    return value


def _is_python(value: Any) -> bool:
    """Whether it is not of a subclass of NumPy's, such as ``numpy.float64`` and ``numpy.str_``."""
    return not hasattr(value, "item") or not hasattr(value, "dtype")


def _expanded(path: str, name: str) -> str:
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(f"{name} is {path!r}, and that user's home directory is not known. Write the whole path.")
    return expanded
