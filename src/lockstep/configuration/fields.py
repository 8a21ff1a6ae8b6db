"""The fields of configurations: their texts, their order, the choices of their types."""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any

from draccus.choice_types import ChoiceType


@functools.cache
def field_texts(cls: type[Any]) -> Mapping[str, str]:
    """The text of each field: the one below it, or its entry under ``Args:``; a parent's where there is none."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base) and base is not cls:
            continue
        arguments = (inspect.getdoc(base) or "").partition("Args:\n")[2].partition("\n\n")[0]
        for entry in re.finditer(r"^    (\w+): (.*(?:\n     +.*)*)", arguments, re.MULTILINE):
            text = re.sub(r"\bNone\b", "null", one_line(entry[2]))
            texts[entry[1]] = text[:1].upper() + text[1:]
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[field.target.id] = one_line(str(after.value.value))
    return texts


def first_paragraph(documented: Any) -> str:
    """The first paragraph of a docstring, as one line."""
    return one_line((inspect.getdoc(documented) or "").partition("\n\n")[0])


def one_line(text: str) -> str:
    """A docstring's text in one line, code in single backticks."""
    return " ".join(text.split()).replace("``", "`")


def options_of(kind: Any) -> list[Any]:
    """Members of a union, None left out; any other type alone."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [option for option in typing.get_args(kind) if option is not type(None)]
    return [kind]


def default_value(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, made anew where it has a factory; ``dataclasses.MISSING`` where it must be given."""
    if field.default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def ordered_fields(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """The fields of a configuration, its own first, then those that it shares with others.

    A field belongs to the class that is the first to have it; a class that only changes its default does not move it.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    ordered: list[dataclasses.Field[Any]] = []
    for position, owner in enumerate(cls.__mro__):
        above = {
            name for base in cls.__mro__[position + 1 :] for name in inspect.get_annotations(base) if name in fields
        }
        ordered += [fields[name] for name in inspect.get_annotations(owner) if name in fields and name not in above]
    return ordered


def refused_keys(cls: type[Any], prefix: str = "") -> set[str]:
    """The keys that a configuration's class has and refuses (`lockstep.errors.refuse_keys`), with their dots."""
    return {prefix + key for key in _refused_keys(cls)}  # type: ignore[arg-type]  # mypy doubts that a class is hashable


@functools.cache
def _refused_keys(cls: type[Any]) -> frozenset[str]:
    keys = set(getattr(cls, "REFUSED", ()))
    for name, hint in typing.get_type_hints(cls).items():
        for kind in options_of(hint):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                keys |= refused_keys(kind, f"{name}.")
    return frozenset(keys)


def choices_of(kind: Any) -> dict[str, Any]:
    """The choices of a block with a ``type``, by its name; none for any other type or for one of its choices."""
    for option in options_of(kind):
        if isinstance(option, type) and issubclass(option, ChoiceType):
            choices = dict(option.get_known_choices())
            return {} if option in choices.values() else choices
    return {}
