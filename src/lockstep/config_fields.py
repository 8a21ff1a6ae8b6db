"""Checks of the fields of a configuration: they hold the same whether YAML or Python gives it."""

import argparse
import collections.abc
import dataclasses
import enum
import functools
import os
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
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
    dict: "a mapping",
    collections.abc.Mapping: "a mapping",
    collections.abc.Callable: "a function",
    types.NoneType: "null",
}
"""Values of a field, by the origin of its type. A value of a field that has any other type is not looked at."""
_PLAIN: Final = {int, float, bool, str}
type _Kinds = tuple[Any, ...]

FilePath = Annotated[str, _PATH]
"""The type of a field that has a local path, or a URL where its docstring says so: ``~`` is the user's home."""


def check_fields(config: Any, block: str = "") -> None:
    """Bring the fields of a configuration into the form that YAML gives them, or refuse them; `__post_init__` calls it.

    A scalar of NumPy becomes a number, a `Path` its text, a column of NumPy, pandas or ``datasets`` and a
    ``ListConfig`` of omegaconf a list, or a tuple where the field is one. In a `FilePath` the home directory takes the
    place of ``~``; a field with the type `Path`, as users' classes have them, becomes absolute too.

    Args:
        block: The key of the configuration itself, with a dot at its end; "" for that of a command.

    Raises:
        ConfigError: A value is no choice of a `Literal`, or no number, text, list, mapping, function or configuration
            where the field has one; the message names the field, the value and what it must be.
    """
    cls: Any = type(config)
    for name, kinds in _kinds_of_fields(cls).items():
        before = getattr(config, name)
        value = _checked(before, kinds, f"{block}{name}")
        if value is not before:
            object.__setattr__(config, name, value)


def encode_config(config: Any, *kinds: Any) -> Any:
    """Return a configuration as JSON values, with the ``type`` of each block that has choices.

    `draccus.encode` leaves the types out in a list where one block may stand too, and fails on Python 3.14 where a
    field is a path or null.

    Args:
        kinds: The types that the place of the configuration may have, as the base of all models.

    Raises:
        ConfigError: A value is of another library.
    """
    if dataclasses.is_dataclass(config):
        cls: Any = type(config)
        inner = _kinds_of_fields(cls)
        values = {
            field.name: encode_config(getattr(config, field.name), *inner.get(field.name, ()))
            for field in dataclasses.fields(config)
        }
        return {"type": cls.get_choice_name(cls)} | values if any(map(_has_choices, kinds)) else values
    of_items = [
        member
        for kind in kinds
        if _origin(kind) in (list, tuple, dict, collections.abc.Mapping)
        for item in typing.get_args(kind)
        for member in _members(item)
    ]
    if isinstance(config, collections.abc.Mapping):
        return {key: encode_config(value, *of_items) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [encode_config(item, *of_items) for item in config]
    if isinstance(config, os.PathLike | enum.Enum):
        return os.fspath(config) if isinstance(config, os.PathLike) else config.name
    if config is None or isinstance(config, bool | int | float | str):
        return config
    raise ConfigError(
        f"a configuration has {config!r:.200}, of {type(config).__name__}, which no run can write down. Use "
        "numbers, texts, lists, mappings, paths, enums and dataclasses."
    )


def _has_choices(kind: Any) -> bool:
    """Whether a block of a type is one of several, by its ``type``; not where the type is one of them."""
    return hasattr(kind, "get_known_choices") and kind not in kind.get_known_choices().values()


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
    if any(_is_choice(value, choice) for choice in choices):
        return value
    if choices and origins <= {typing.Literal, types.NoneType}:
        if value is None and types.NoneType in origins:
            return value
        known = [*choices, *([None] if types.NoneType in origins else [])]
        shown = ", ".join("null" if choice is None else str(choice) for choice in known)
        raise ConfigError(f"{name} is {value!r}; it must be one of {shown}. Correct it.")
    if (
        isinstance(value, str)
        and value in ("None", "none")
        and types.NoneType in origins
        and origins & {str, Annotated}
    ):
        raise ConfigError(
            f"{name} is the text {value!r}; no value is written null in YAML, None in Python. Correct it."
        )
    if isinstance(value, str) and FilePath in kinds:
        return _expanded(value, name)
    if isinstance(value, str | os.PathLike) and any(map(_is_path, origins)):
        return _local_path(value, str in origins, name)
    if text := misfit(value, kinds):
        fix = f"Use [{value!r:.200}]" if isinstance(value, str) and origins & {list, tuple} else "Correct it"
        raise ConfigError(f"{name} is {value!r:.200}; it must be {text}. {fix}.")
    if isinstance(value, dict):
        return _checked_values(value, kinds, name)
    return _checked_items(value, kinds, name) if isinstance(value, list | tuple) else value


def _checked_values(mapping: dict[Any, Any], kinds: _Kinds, name: str) -> dict[Any, Any]:
    for kind in kinds:
        if _origin(kind) in (dict, collections.abc.Mapping) and (inner := typing.get_args(kind)):
            checked = {key: _checked(value, _members(inner[1]), f"{name}.{key}") for key, value in mapping.items()}
            unchanged = all(checked[key] is value for key, value in mapping.items())
            return mapping if unchanged else checked
    return mapping


def _checked_items(items: Sequence[Any], kinds: _Kinds, name: str) -> Any:
    """The items of a list, in a list or a tuple as the field has it."""
    for kind in kinds:
        container, inner = _origin(kind), typing.get_args(kind)
        if container not in (list, tuple) or not inner:
            continue
        if container is tuple and inner[-1] is not Ellipsis:
            if len(items) != len(inner):
                raise ConfigError(f"{name} is {items!r:.200}; it must have {len(inner)} items. Correct it.")
            kinds_of_items = [_members(kind) for kind in inner]
        else:
            kinds_of_items = [_members(inner[0])] * len(items)
            if {type(item) for item in items} <= _PLAIN & set(kinds_of_items[0] if items else ()):
                return items if isinstance(items, container) else container(items)  # many tokens, or none
        pairs = enumerate(zip(items, kinds_of_items, strict=True))
        checked = [_checked(item, kinds, f"{name}[{at}]") for at, (item, kinds) in pairs]
        unchanged = all(new is old for new, old in zip(checked, items, strict=True))
        return items if unchanged and isinstance(items, container) else container(checked)
    return items


def misfit(value: Any, kinds: Sequence[Any]) -> str:
    """The words for what a value must be, where it has none of some known types; else ""."""
    origins = set(map(_origin, kinds))
    if not all(map(_is_known, origins)) or _fits(value, origins):
        return ""
    return " or ".join(dict.fromkeys(_text_of(kind) for kind in (*_NAMES, *origins) if kind in origins))


def _fits(value: Any, origins: set[Any]) -> bool:
    """Whether a value has one of some types; a whole number is a number too, and true and false are none."""
    if isinstance(value, bool):
        return bool in origins
    if isinstance(value, int):
        return not origins.isdisjoint({int, float})
    if isinstance(value, list | tuple):
        return not origins.isdisjoint({list, tuple})
    return any(isinstance(value, origin) for origin in origins - {Annotated, typing.Literal})


def _is_choice(value: Any, choice: Any) -> bool:
    same_type = isinstance(value, type(choice)) and isinstance(value, bool) == isinstance(choice, bool)
    return same_type and bool(value == choice)


def _is_known(kind: Any) -> bool:
    """Whether values are compared with a type: one of `_NAMES`, a path, a configuration or a choice of several."""
    is_block = dataclasses.is_dataclass(kind) or hasattr(kind, "get_choice_class")
    return kind in _NAMES or _is_path(kind) or isinstance(kind, type) and is_block


def _text_of(kind: Any) -> str:
    return _NAMES.get(kind) or ("a path" if _is_path(kind) else f"a {kind.__name__}")


def _is_path(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, os.PathLike)


def _plain(value: Any, origins: set[Any]) -> Any:
    """A value of another library as Python's own, where the field can have that."""
    if value is None or isinstance(value, bool | int | float | str | list | tuple | dict) and _is_python(value):
        return value
    if isinstance(value, os.PathLike) and origins & {str, Annotated} and not any(map(_is_path, origins)):
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
    if re.search(r"\$\w|\$\{", path) and not os.path.lexists(path):
        raise ConfigError(f"{name} is {path!r}, and variables of a shell mean nothing in it. Write the whole path.")
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(f"{name} is {path!r}, and that user's home directory is not known. Write the whole path.")
    return expanded


def option_path(text: str) -> Path:
    """The type of an option of a command line that is a local path: no shell expands ``~`` in ``--output=~/FILE``."""
    try:
        return Path(_expanded(text, "the path"))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _local_path(path: str | os.PathLike[str], may_be_text: bool, name: str) -> str | Path:
    """A path of a user's own class: the same file whatever becomes the working directory; a URL as it is."""
    text = os.fspath(path)
    if "://" not in text:
        text = os.path.abspath(_expanded(text, name))
    return text if may_be_text and isinstance(path, str) else Path(text)
