"""The page of all configuration keys, from the dataclasses that the commands read.

scripts/docs_site.py puts it into the site.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from draccus.choice_types import ChoiceType

from lockstep.configuration import default_value, field_texts, first_paragraph, options_of, ordered_fields, refused_keys
from lockstep.main.commands import configured_commands

HEAD = """\
# Configuration

Made from the docstrings of the dataclasses by `scripts/make_config_docs.py`.

Every command reads `--config_path FILE.yaml` and any key on the command line, which wins: `--trainer.seed 3`,
`--inference_eval.layout '{tensor: 2}'`. Values are YAML. An unknown key ends the run on every host, with the closest
known key. `lockstep COMMAND --help` lists the keys of a command. Complete files are in [config/](../config).
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## Commands\n"]
    blocks: dict[tuple[str, type[Any]], list[str]] = {}
    configs = {name: command.config() for name, command in configured_commands().items()}
    refused = {name: refused_keys(cls) for name, cls in configs.items()}
    for command, cls in configs.items():
        parts.append(_section(f"`lockstep {command}`", cls, 3))
        for block in _nested(cls, ""):
            blocks.setdefault(block, []).append(command)
    parts.append("## Blocks\n")
    for (key, block), commands in blocks.items():
        where = "" if len(commands) == len(configs) else f" of `lockstep {', '.join(commands)}`"
        lines = _section(f"`{key}`{where}", block, 3).split("\n")
        for name in {name for each in commands for name in refused[each]}:
            refusing = [each for each in commands if name in refused[each]]
            row = f"| `{name.removeprefix(f'{key}.')}` |"
            note = f"{row[:-2]} (not of {', '.join(refusing)}) |"
            lines = [
                note + x.removeprefix(row) if x.startswith(row) else x
                for x in lines
                if len(refusing) < len(commands) or not x.startswith(row)
            ]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _section(title: str, cls: type[Any], level: int) -> str:
    """A heading, what the class is, and a table of its keys; for a choice, one such section per choice."""
    lines = [f"{'#' * level} {title}\n", f"{_markdown(first_paragraph(cls))}\n"]
    if issubclass(cls, ChoiceType):
        return "\n".join([*lines, *_choices(cls, level + 1)])
    return "\n".join([*lines, *_table(cls, ordered_fields(cls))])


def _choices(cls: type[Any], level: int) -> Iterator[str]:
    """Sections of the choices; one that extends another lists only what differs from it."""
    for name, choice in cls.get_known_choices().items():
        yield f"{'#' * level} `type: {name}`\n"
        yield f"{_markdown(first_paragraph(choice))}\n"
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
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for field in fields:
        if not texts.get(field.name):
            raise SystemExit(f"{cls.__module__}.{cls.__qualname__}.{field.name} has no docstring")
        cells = [f"`{field.name}`", _type_name(hints[field.name]), _default(field), _markdown(texts[field.name])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _nested(cls: type[Any], prefix: str) -> Iterator[tuple[str, type[Any]]]:
    """The blocks below a class with the key that leads to each, outermost first."""
    hints = typing.get_type_hints(cls)
    for field in ordered_fields(cls):
        for option in dict.fromkeys(_item(option) for option in options_of(hints[field.name])):
            if isinstance(option, type) and (dataclasses.is_dataclass(option) or issubclass(option, ChoiceType)):
                key = f"{prefix}{field.name}"
                yield key, option
                inner = option
                if not dataclasses.is_dataclass(option):
                    inner = next(iter(option.get_known_choices().values()))
                yield from _nested(inner, f"{key}.")


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
    value = default_value(field)
    if value is dataclasses.MISSING:
        return "required"
    if any(dataclasses.is_dataclass(each) for each in (value if isinstance(value, list) else [value])):
        return "its defaults"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple | list) else value}`"


def _markdown(text: str) -> str:
    """A line with its addresses as links."""
    return re.sub(r"(?<![<(])https?://[^\s,)]+", lambda address: f"<{address[0]}>", text)
