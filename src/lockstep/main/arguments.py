"""Configurations from a YAML file and ``--a.b value`` overrides, and the texts of their fields."""

import ast
import dataclasses
import difflib
import functools
import inspect
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import draccus
from draccus.choice_types import CHOICE_TYPE_KEY, ChoiceType
from draccus.parsers import decoding
from draccus.utils import DecodingError, ParsingError

from lockstep.errors import ConfigError, LockstepError
from lockstep.json_text import refused
from lockstep.main.yaml_values import WrittenFloat, WrittenInteger, load_yaml, read_yaml, yaml_reason
from lockstep.plugins import modules_beside
from lockstep.printable import SECRET_OPTION


@functools.cache
def field_texts(cls: type[Any]) -> Mapping[str, str]:
    """The text of each field: the one below it, or its entry under ``Args:``; a parent's where there is none."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each) and each is not cls:
            continue
        given = (inspect.getdoc(each) or "").partition("Args:\n")[2].partition("\n\n")[0]
        for entry in re.finditer(r"^    (\w+): (.*(?:\n     +.*)*)", given, re.MULTILINE):
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


CONFIG_PATH = "config_path"
BASE_MODEL = "base_model"  # the key of a base model, or of the configuration of the run that was initialized from it


def parse_arguments[Config](cls: type[Config], arguments: Sequence[str]) -> Config:
    """Build a configuration from a command line.

    Args:
        arguments: ``--config_path FILE`` and ``--key.in.dots VALUE`` or ``--key.in.dots=VALUE``. Values are YAML; of
            several for a key the last wins. The caller handles ``--help``.

    Raises:
        ConfigError: An argument or the file cannot be read, a key is unknown, or a value is out of its range.
    """
    path = dict(pairs(arguments)).get(CONFIG_PATH)
    values = read_values(arguments)
    where = "the command line" if path is None else f"{path} (or the command line)"
    return decode_config(cls, values, where)


def name_words(arguments: Sequence[str], keys: Sequence[str], usage: str) -> list[str]:
    """Put a key before each word of a command line that has none."""
    left, rest, named = list(keys), list(arguments), list[str]()
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            named.append(word)
            if "=" not in word and rest and not rest[0].startswith("--"):
                named.append(rest.pop(0))
        elif left:
            named += [f"--{left.pop(0)}", word]
        else:
            raise ConfigError(f"{word!r} is one word too many: {usage}.")
    return named


def read_values(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command line and its file, before they are made a configuration.

    The directory of the file comes last on ``sys.path`` where a module that it names (``module:name``) is there.
    """
    overrides = dict(pairs(arguments))
    path = overrides.pop(CONFIG_PATH, None)
    values: dict[str, Any] = {}
    if path is not None:
        values, text = read_yaml(str(path))
        folder = os.path.dirname(os.path.abspath(os.path.expanduser(path)))
        # Last: a file of the user's takes no name from a package that is imported later.
        if folder not in sys.path and modules_beside(path, " ".join((text, *arguments))):
            sys.path.append(folder)
    for key, value in overrides.items():
        _set(values, key, value)
    if isinstance(base := values.get(BASE_MODEL), str) and base.endswith((".yaml", ".yml")):
        values[BASE_MODEL] = _base_of_run(base)
    return values


def _base_of_run(path: str) -> str:
    """The base model that the configuration of a training run names."""
    base = read_yaml(path, BASE_MODEL)[0].get("initialize_from_hf")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"base_model is the configuration {path!r}, which names no initialize_from_hf. Give the directory or URL "
            "of the base model itself."
        )
    return base


def decode_config[Config](cls: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """Build a configuration from nested mappings."""
    with refused(where, "Correct it there."):
        given = checked_values(cls, values, (), where)
        try:
            return typing.cast(Config, draccus.decode(cls, given))
        except ParsingError as error:
            raise ConfigError(f"{where}: {_reason(error)}") from error


def checked_values(kind: Any, value: Any, path: tuple[str, ...], where: str) -> Any:
    """The values for draccus, which checks what this does not: keys, nulls, and texts that YAML takes for others.

    Raises:
        ConfigError: A key or a choice is unknown; the message has its path and the closest known one. Or a value is
            null, true or false, or a text, where that is none.
    """
    kinds = _kinds(kind)
    if not isinstance(value, Mapping) and (block := _block(kinds, value)):
        value = _as_block(block, value, ".".join(path), where)
    if isinstance(value, Mapping):
        cls = _dataclass_of(kind, value, path, where)
        if cls is None:
            of_values = [typing.get_args(each)[1] for each in kinds if typing.get_origin(each) in (dict, Mapping)]
            inner_kind = of_values[0] if of_values else Any
            return {key: checked_values(inner_kind, inner, (*path, str(key)), where) for key, inner in value.items()}
        hints = typing.get_type_hints(cls)
        inner_kinds = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
        extra = {CHOICE_TYPE_KEY: Any} if choices_of(kind) else {}
        for key in value:
            if key not in inner_kinds and key not in extra:
                known = _suggest(str(key), inner_kinds.keys() - refused_keys(cls), "key")
                raise ConfigError(f"{where}: unknown key {'.'.join((*path, str(key)))!r}. {known}")
        inner_kinds = {**extra, **inner_kinds}
        return {key: checked_values(inner_kinds[key], inner, (*path, key), where) for key, inner in value.items()}
    lists = [typing.get_args(each) for each in kinds if typing.get_origin(each) in (tuple, list)]
    if isinstance(value, list):
        items = tuple(each for arguments in lists for each in arguments if each is not Ellipsis)
        item_kind = typing.Union[items] if items else Any  # noqa: UP007 (of types that are known at run time alone)
        return [checked_values(item_kind, item, (*path, str(index)), where) for index, item in enumerate(value)]
    name = ".".join(path)
    if value is None and not {type(None), Any, object}.intersection(kinds):
        raise ConfigError(f"{where}: {name!r} is null (no value). Give it one, or remove the line for its default.")
    if isinstance(value, str) and len(lists) == len([each for each in kinds if each is not type(None)]):
        if value and any(str in arguments for arguments in lists):
            return [value]
        raise ConfigError(f"{where}: {name!r} is the text {value!r}; it must be a list. Write [{value}].")
    if str in kinds and not {int, float, bool, Any}.intersection(kinds):
        if isinstance(value, bool):
            raise ConfigError(f"{where}: {name!r} is {value} to YAML; it must be a text. Put it in quotes.")
        return getattr(value, "source", value)
    if isinstance(value, WrittenInteger | WrittenFloat):
        return int(value) if isinstance(value, int) else float(value)
    return value


def _block(kinds: Sequence[Any], value: Any) -> type[Any] | None:
    """The class of the block that a value should be, where it can be nothing else."""
    blocks = [kind for kind in kinds if kind is not type(None)]
    if value is None or not blocks or not all(map(dataclasses.is_dataclass, blocks)):
        return None
    return typing.cast(type[Any], blocks[0])


def _as_block(block: type[Any], value: Any, name: str, where: str) -> Any:
    """The keys of a block that is written as Levanter writes it, where its class reads that; else an error."""
    from_list = getattr(block, "from_list", None)
    if isinstance(value, list) and from_list is not None:
        return from_list(value)
    choices = choices_of(block)
    fields = [CHOICE_TYPE_KEY] if choices else [field.name for field in ordered_fields(block)]
    last = name.rpartition(".")[2]
    values = {**dict.fromkeys(fields, "…"), CHOICE_TYPE_KEY: next(iter(choices), "…")}
    shown = "a list" if isinstance(value, list) else f"{value!r:.80}"
    raise ConfigError(
        f"{where}: {name!r} is {shown}; it must be a block with keys ({', '.join(fields)}). Write e.g. "
        f"{last}: {{{fields[0]}: {values[fields[0]]}}}."
    )


def _kinds(kind: Any) -> list[Any]:
    """The members of a union, and of unions in it; any other type alone."""
    if isinstance(kind, typing.TypeAliasType):
        return _kinds(kind.__value__)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [each for option in typing.get_args(kind) for each in _kinds(option)]
    return [kind]


def ordered_fields(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """The fields of a configuration, its own first, then those that it shares with others.

    A field belongs to the class that is the first to have it; a class that only changes its default does not move it.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    ordered: list[dataclasses.Field[Any]] = []
    for position, each in enumerate(cls.__mro__):
        above = {
            name for base in cls.__mro__[position + 1 :] for name in inspect.get_annotations(base) if name in fields
        }
        ordered += [fields[name] for name in inspect.get_annotations(each) if name in fields and name not in above]
    return ordered


def refused_keys(cls: type[Any], prefix: str = "") -> set[str]:
    """The keys that a configuration's class has and refuses (`lockstep.errors.refuse_keys`), with their dots."""
    found = {prefix + key for key in getattr(cls, "REFUSED", ())}
    for name, hint in typing.get_type_hints(cls).items():
        for kind in options_of(hint):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found |= refused_keys(kind, f"{prefix}{name}.")
    return found


def choices_of(kind: Any) -> dict[str, Any]:
    """The choices of a block with a ``type``, by its name; none for any other type or for one of its choices."""
    for option in options_of(kind):
        if isinstance(option, type) and issubclass(option, ChoiceType):
            choices = dict(option.get_known_choices())
            return {} if option in choices.values() else choices
    return {}


def pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The keys of a command line with their values; that of `CONFIG_PATH` is a text."""
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"argument {flag!r} was not expected. Write --{CONFIG_PATH} FILE or --key VALUE.")
        key, equals, text = flag[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"argument --{key} has no value. Write --{key} VALUE (true or false for a switch).")
            text = rest.pop(0)
        try:
            yield key, text if key == CONFIG_PATH or not text else load_yaml(text)
        except Exception as error:  # the YAML parser has its own errors
            shown = "a value" if SECRET_OPTION.search(key) else f"the value {text!r}"
            raise ConfigError(
                f"argument --{key} has {shown}, which is not YAML: {yaml_reason(error)}. Quote it."
            ) from None


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.get(parent)
        values[parent] = values = dict(inner) if isinstance(inner, dict) else {}  # an alias has the same one elsewhere
    values[last] = value


def _dataclass_of(kind: Any, value: Mapping[str, Any], path: tuple[str, ...], where: str) -> type[Any] | None:
    """The dataclass that a mapping is meant for; None where any keys go."""
    choices = choices_of(kind)
    if choices:
        registry = next(o for o in options_of(kind) if isinstance(o, type) and issubclass(o, ChoiceType))
        name = value.get(CHOICE_TYPE_KEY, registry.default_choice_name())
        try:
            return typing.cast(type[Any], registry.get_choice_class(name))
        except (KeyError, TypeError):  # a type that is a list cannot be looked up
            raise ConfigError(
                f"{where}: {'.'.join((*path, CHOICE_TYPE_KEY))!r} is {name!r}. {_suggest(str(name), choices, 'type')}"
            ) from None
    found = [option for option in options_of(kind) if dataclasses.is_dataclass(option)]
    return typing.cast(type[Any], found[0]) if len(found) == 1 else None


def _suggest(given: str, known: typing.Iterable[str], noun: str) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(given[:80], known, n=1, cutoff=0.5)
    listed = f"Known {noun}s here: {', '.join(known) or 'none'}."
    return f"Did you mean {close[0]!r}? {listed}" if close else listed


def _reason(error: BaseException) -> str:
    """The most specific message: our own where it is in the chain of causes, else draccus's with its key."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LockstepError):
            return str(cause)
        cause = cause.__cause__
    innermost = error
    while isinstance(innermost.__cause__, DecodingError):
        innermost = innermost.__cause__
    return str(innermost)


def _decode_text(value: Any, path: Sequence[str]) -> str:
    """A text, also from a scalar that YAML reads as something else.

    draccus would make a text of a list or a mapping too: a field that may be a text or a list would never be a list.
    """
    if isinstance(value, str | int | float):
        return str(value)
    raise DecodingError(path, f"Expected a text, got {value!r}")


draccus.decode.register(str, _decode_text)
decoding.get_decoding_fn.cache_clear()
