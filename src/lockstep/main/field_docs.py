"""What the docstrings of a configuration say of its fields, for ``--help`` and for the page of all keys."""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from typing import Any


def field_texts(cls: type[Any]) -> dict[str, str]:
    """What is said of each field: the text below it, or its entry under ``Args:``; a parent's where there is none.

    Args:
        cls: A configuration's dataclass.

    Returns:
        The text of each field that has one, by its name: one line, code in single backticks.
    """
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each) and each is not cls:
            continue
        for entry in re.finditer(r"^    (\w+): (.*(?:\n     +.*)*)", _args(each), re.MULTILINE):
            text = re.sub(r"\bNone\b", "null", one_line(entry[2]))
            texts[entry[1]] = text[:1].upper() + text[1:]
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[field.target.id] = one_line(str(after.value.value))
    return texts


def first_paragraph(documented: Any) -> str:
    """The first paragraph of a docstring, as one line.

    Args:
        documented: A class, a function or a module.
    """
    return one_line((inspect.getdoc(documented) or "").partition("\n\n")[0])


def one_line(text: str) -> str:
    """A docstring's text in one line, code in single backticks.

    Args:
        text: The text.
    """
    return " ".join(text.split()).replace("``", "`")


def options_of(kind: Any) -> list[Any]:
    """Members of a union, None left out; any other type alone.

    Args:
        kind: A type as in an annotation.
    """
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [option for option in typing.get_args(kind) if option is not type(None)]
    return [kind]


def default_value(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, made anew where it has a factory; ``dataclasses.MISSING`` where it must be given.

    Args:
        field: A field of a configuration.
    """
    if field.default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _args(cls: type[Any]) -> str:
    _, _, rest = (inspect.getdoc(cls) or "").partition("Args:\n")
    return rest.partition("\n\n")[0]
