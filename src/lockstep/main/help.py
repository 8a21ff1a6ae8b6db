"""Help and shell completion, made from the table of commands and the fields of the configurations."""

import argparse
import dataclasses
import re
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final

import shtab

from lockstep.configuration import (
    choices_of,
    default_value,
    field_texts,
    first_paragraph,
    options_of,
    ordered_fields,
    refused_keys,
)
from lockstep.errors import ConfigError
from lockstep.main.arguments import CONFIG_PATH
from lockstep.main.commands import COMMANDS, Command

ADDED_OPTIONS: Final = "options"  # title of the group of options that every command has
WIDTH: Final = 120
"""Columns of a help text at most, and where there is no terminal."""
HELP_WIDTH: Final = 76
"""Columns that the explanation of a key has beside its name; where a terminal has fewer it is below the name."""


def terminal_width() -> int:
    """The columns that a help text may have here, at least 40."""
    return max(40, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, terminal_width(), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a configuration."""

    name: str
    kind: Any
    default: str  # its default as in YAML, `required` where there is none; "" where none is shown
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyGroup:
    """The keys of one block of a configuration."""

    name: str  # the key of the block; "" for the keys outside of any
    text: str
    keys: list[Key]  # its keys, without those of blocks in it


def overview() -> str:
    """The text of ``lockstep --help``: the commands by what they are for."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [
        _wrapped("usage: lockstep COMMAND [--config_path FILE.yaml] [--key.in.dots VALUE ...]", " " * 7),
        "",
        "See what your model says while it trains on a TPU pod.",
    ]
    for purpose in dict.fromkeys(command.purpose for command in COMMANDS):
        lines += ["", f"{purpose}:"]
        indent = " " * (width + 4)
        lines += [
            _wrapped(f"  {command.name:<{width}}  {command.summary}", indent)
            for command in COMMANDS
            if command.purpose == purpose
        ]
    lines += [
        "",
        "of every command:",
        _wrapped(
            "  --help [BLOCK]  its keys with their defaults, or those of one block, such as inference_eval; an example",
            " " * 18,
        ),
        _wrapped("  --debug         show the stack of an error that is explained in a line otherwise", " " * 18),
        "",
        _wrapped("A command runs on every host of a job at once. Several processes on one machine:"),
        "  lockstep launch --processes 2 --devices_per_process 2 -- lockstep COMMAND ...",
        _wrapped("All keys, public names and pages as a site: make docs, in a clone of the repository."),
    ]
    return "\n".join(lines)


def command_help(command: Command, block: str | None = None) -> str:
    """The text of ``lockstep COMMAND --help``, or of one block of its configuration."""
    description = command.description or f"{command.summary[:1].upper()}{command.summary[1:]}."
    width = terminal_width()
    parser = argparse.ArgumentParser(
        prog=f"lockstep {command.name}",
        usage=_wrapped(f"usage: lockstep {command.name} {command.usage}", " " * 7).removeprefix("usage: "),
        description=_wrapped(description),
        epilog=f"example:\n{textwrap.indent(command.example, '  ')}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=max(8, width - HELP_WIDTH), width=width
        ),
        add_help=False,
    )
    add_keys(parser, command, block)
    return parser.format_help()


def add_keys(parser: argparse.ArgumentParser, command: Command, block: str | None = None) -> None:
    """Add what a command can be given, in groups."""
    groups = list(key_groups(command.config())) if command.config_class is not None else []
    if block is not None:
        chosen = [group for group in groups if group.name == block or group.name.startswith(f"{block}.")]
        if not chosen:
            known = ", ".join(group.name for group in groups if group.name)
            raise ConfigError(f"{command.name} has no block {block!r}. Known blocks: {known or 'none'}.")
        groups = chosen
    else:
        command.add_options(parser)
        options = parser.add_argument_group(ADDED_OPTIONS)
        if command.reads_config:
            options.add_argument(
                f"--{CONFIG_PATH}", metavar="FILE", help="YAML file with any of the keys below; the command line wins"
            )
        options.add_argument("--debug", action="store_true", help="show the stack of every error")
        options.add_argument("--help", metavar="BLOCK", nargs="?", help="show this, or the keys of one block alone")
    for group in groups:
        _add_group(parser, group)


def key_groups(cls: type[Any], name: str = "", refused: Set[str] = frozenset()) -> Iterator[KeyGroup]:
    """The keys of a configuration by block, outermost first.

    Args:
        name: The key that leads to it; "" for a whole configuration.
        refused: Keys to leave out, beside those that the configuration refuses.

    Yields:
        A block. One that has a ``type`` has the keys of all types.
    """
    prefix = f"{name}." if name else ""
    refused = refused | refused_keys(cls, prefix)
    hints, texts = typing.get_type_hints(cls), field_texts(cls)  # type: ignore[arg-type]  # mypy doubts that a class is hashable
    keys, inner = [], []
    for field in ordered_fields(cls):
        key, kind = prefix + field.name, hints[field.name]
        blocks = [
            option for option in options_of(kind) if dataclasses.is_dataclass(option) and isinstance(option, type)
        ]
        text = texts.get(field.name, "")
        if choices := choices_of(kind):
            inner.append(_choice_group(key, text, choices))
        elif blocks:
            inner += key_groups(blocks[0], key, refused)
        elif key not in refused:
            keys.append(Key(name=key, kind=kind, default=_default(field), text=text))
    yield KeyGroup(name=name, text=first_paragraph(cls), keys=keys)
    yield from inner


def _choice_group(name: str, text: str, choices: dict[str, Any]) -> KeyGroup:
    """The keys of all types of a block; each says which types have it, where not all do."""
    keys_by_name: dict[str, list[tuple[str, Key]]] = {}
    for choice, cls in choices.items():
        for group in key_groups(cls, name):
            for key in group.keys:
                keys_by_name.setdefault(key.name, []).append((choice, key))
    keys = [Key(name=f"{name}.type", kind=typing.Literal[*choices], default="", text="which of these it is")]
    for variants in keys_by_name.values():
        (_, first), types = variants[0], [choice for choice, _ in variants]
        only = "" if len(types) == len(choices) else f"type {', '.join(types)}: "
        same = len({key.default for _, key in variants}) == 1
        default = first.default if same else "differs by type"
        keys.append(dataclasses.replace(first, default=default, text=only + first.text))
    return KeyGroup(name=name, text=text, keys=keys)


def _add_group(parser: argparse.ArgumentParser, group: KeyGroup) -> None:
    width = terminal_width()
    about = "\n".join(textwrap.wrap(group.text.replace("%", "%%"), width - 2))
    added = parser.add_argument_group(group.name or "keys", about)
    for key in group.keys:
        kinds = options_of(key.kind)
        values = (
            [str(choice) for choice in typing.get_args(kinds[0])]
            if typing.get_origin(kinds[0]) is typing.Literal
            else []
        )
        if bool in kinds:
            values = ["true", "false"]
        default = key.default if key.default in ("", "required") else f"default: {key.default}"
        text = f"{key.text} ({default})" if default else key.text
        one_line = len(f"  --{key.name} {{{','.join(values)}}}") <= width
        if not one_line:
            text = f"{text}: {', '.join(values)}"
        added.add_argument(
            f"--{key.name}",
            metavar=None if values and one_line else _metavar(key.kind),
            choices=values or None,
            help=text.replace("%", "%%"),
        )


def _metavar(kind: Any) -> str:
    """The shape of a value: a word for each of the types that it may have."""
    words = {str: "TEXT", int: "N", float: "X", Any: "VALUE"}
    shown = []
    for option in options_of(kind):
        origin = typing.get_origin(option) or option
        shown.append("LIST" if origin in (list, tuple) else "MAPPING" if origin is dict else words.get(origin, "VALUE"))
    return "|".join(dict.fromkeys(shown))


def _default(field: dataclasses.Field[Any]) -> str:
    value = default_value(field)
    if value is dataclasses.MISSING:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _first_sentence(text: str) -> str:
    """A text up to its first full stop, with a small letter at its beginning unless that is a name."""
    sentence = re.split(r"(?<!e\.g)\. (?=[A-Z`])", text, maxsplit=1)[0].removesuffix(".")
    lower = sentence[:1].lower() + sentence[1:]
    return lower if sentence[1:2].islower() or sentence[1:2] == " " else sentence


SHELLS: Final = ("bash", "zsh", "fish")


def completion(arguments: Sequence[str]) -> int:
    """Print the completion script of a shell."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        shown = " ".join(arguments) or "nothing"
        raise ConfigError(f"lockstep completion was given {shown}; it takes one of {', '.join(SHELLS)}.")
    print(script(arguments[0]))
    return 0


def script(shell: str) -> str:
    """The completion script of a shell: text alone, so that the Tab key starts no Python."""
    parser = argparse.ArgumentParser(prog="lockstep", description="See what your model says while it trains.")
    commands = parser.add_subparsers(dest="command")
    for command in COMMANDS:
        # A key that two blocks of a launcher share is one word to a shell.
        subparser = commands.add_parser(command.name, help=command.summary, add_help=False, conflict_handler="resolve")
        add_keys(subparser, command)
        for action in subparser._actions:
            action.help = _first_sentence(action.help or "")
            if f"--{CONFIG_PATH}" in action.option_strings:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    text: str = shtab.complete(parser, shell)
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given, for ``--help``."""
    parser.add_argument("shell", choices=SHELLS, help="whose completion script to print")
