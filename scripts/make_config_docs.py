"""Writes docs/configuration.md from the dataclasses that the commands read; ``--check`` only says if it is up to date.

Run it as ``.venv/bin/python scripts/make_config_docs.py``.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draccus.choice_types import ChoiceType

from lockstep.main.arguments import ordered_fields
from lockstep.main.commands import configured_commands

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """\
# Configuration

Written by `scripts/make_config_docs.py` from the docstrings of the dataclasses; do not edit it by hand.

Every command reads `--config_path FILE.yaml` and any key on the command line, which wins: `--trainer.seed 3`,
`--inference_eval.layout '{tensor: 2}'`. Values are YAML. An unknown key ends the run on every host, with the closest
known key. `lockstep COMMAND --help` lists the keys of a command. Complete files are in [config/](../config).
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## Commands\n"]
    blocks: dict[tuple[str, type[Any]], list[str]] = {}
    configs = {name: command.config() for name, command in configured_commands().items()}
    for command, cls in configs.items():
        parts.append(_section(f"`lockstep {command}`", cls, 3))
        for block in _nested(cls, ""):
            blocks.setdefault(block, []).append(command)
    parts.append("## Blocks\n")
    for (key, block), commands in blocks.items():
        where = "" if len(commands) == len(configs) else f" of `lockstep {', '.join(commands)}`"
        parts.append(_section(f"`{key}`{where}", block, 3))
    return "\n".join(parts)


def _section(title: str, cls: type[Any], level: int) -> str:
    """A heading, what the class is, and a table of its keys; for a choice, one such section per choice."""
    lines = [f"{'#' * level} {title}\n", f"{_first_paragraph(cls)}\n"]
    if issubclass(cls, ChoiceType):
        return "\n".join([*lines, *_choices(cls, level + 1)])
    return "\n".join([*lines, *_table(cls, ordered_fields(cls))])


def _choices(cls: type[Any], level: int) -> Iterator[str]:
    """Sections of the choices; one that extends another lists only what differs from it."""
    for name, choice in cls.get_known_choices().items():
        yield f"{'#' * level} `type: {name}`\n"
        yield f"{_first_paragraph(choice)}\n"
        parents = [c for n, c in cls.get_known_choices().items() if c in choice.__mro__[1:]]
        fields = ordered_fields(choice)
        if parents:
            before = {f.name: f.default for f in dataclasses.fields(parents[0])}
            fields = [f for f in fields if f.name not in before or before[f.name] != f.default]
            base = next(n for n, c in cls.get_known_choices().items() if c is parents[0])
            but = ", with these defaults of its own:" if fields else "."
            yield f"The keys of `type: {base}`{but}\n"
        if fields:
            yield from _table(choice, fields)


def _table(cls: type[Any], fields: typing.Iterable[dataclasses.Field[Any]]) -> list[str]:
    hints, texts = typing.get_type_hints(cls), _field_texts(cls)
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for field in fields:
        if not texts.get(field.name):
            raise SystemExit(f"{cls.__module__}.{cls.__qualname__}.{field.name} has no docstring")
        cells = [f"`{field.name}`", _type_name(hints[field.name]), _default(field), texts[field.name]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _nested(cls: type[Any], prefix: str) -> Iterator[tuple[str, type[Any]]]:
    """The blocks below a class with the key that leads to each, outermost first."""
    hints = typing.get_type_hints(cls)
    for field in ordered_fields(cls):
        for option in dict.fromkeys(_item(option) for option in _options(hints[field.name])):
            if isinstance(option, type) and (dataclasses.is_dataclass(option) or issubclass(option, ChoiceType)):
                key = f"{prefix}{field.name}"
                yield key, option
                inner = option
                if not dataclasses.is_dataclass(option):
                    inner = next(iter(option.get_known_choices().values()))
                yield from _nested(inner, f"{key}.")


def _options(kind: Any) -> list[Any]:
    """Members of a union, None left out."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [option for option in typing.get_args(kind) if option is not type(None)]
    return [kind]


def _item(kind: Any) -> Any:
    """What a list is a list of; anything else as it is."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) in (list, tuple) else kind


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(option) for option in arguments)
    if origin is typing.Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        item = _type_name(arguments[0])
        return f"list of ({item})" if " | " in item else f"list of {item}"
    if origin is dict or kind is dict:
        return "mapping"
    if kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, ChoiceType):
        return "block with `type`"
    if dataclasses.is_dataclass(kind):
        return "block"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true | false"}.get(kind.__name__, "any")


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        if field.default_factory is dataclasses.MISSING:
            return "required"
        value = field.default_factory()
    if any(dataclasses.is_dataclass(each) for each in (value if isinstance(value, list) else [value])):
        return "its defaults"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple | list) else value}`"


def _field_texts(cls: type[Any]) -> dict[str, str]:
    """What is said of each field: the text below it, or its entry under ``Args:``; a parent's where there is none."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each) and each is not cls:
            continue
        for entry in re.finditer(r"^    (\w+): (.*(?:\n     +.*)*)", _args(each), re.MULTILINE):
            text = re.sub(r"\bNone\b", "null", _markdown(entry[2]))
            texts[entry[1]] = text[:1].upper() + text[1:]
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[field.target.id] = _markdown(str(after.value.value))
    return texts


def _args(cls: type[Any]) -> str:
    _, _, rest = (inspect.getdoc(cls) or "").partition("Args:\n")
    return rest.partition("\n\n")[0]


def _first_paragraph(cls: type[Any]) -> str:
    return _markdown((inspect.getdoc(cls) or "").partition("\n\n")[0])


def _markdown(text: str) -> str:
    """One line; code in single backticks; addresses as links."""
    line = " ".join(text.split()).replace("``", "`")
    return re.sub(r"(?<![<(])https?://[^\s,)]+", lambda address: f"<{address[0]}>", line)


def main() -> int:
    """Write the page, or with ``--check`` compare it."""
    page = render()
    if "--check" in sys.argv[1:]:
        if OUTPUT.exists() and OUTPUT.read_text(encoding="utf-8") == page:
            return 0
        print(f"{OUTPUT} is not up to date; run {Path(__file__).name}", file=sys.stderr)
        return 1
    OUTPUT.write_text(page, encoding="utf-8")
    print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
