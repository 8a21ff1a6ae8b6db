"""Configurations from nested mappings, with errors that name the key and the closest known one."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import draccus
from draccus.choice_types import CHOICE_TYPE_KEY, ChoiceType
from draccus.parsers import decoding
from draccus.utils import DecodingError, ParsingError

from lockstep.config_fields import misfit
from lockstep.configuration.fields import choices_of, options_of, ordered_fields, refused_keys
from lockstep.configuration.yaml_values import WrittenFloat, WrittenInteger
from lockstep.errors import ConfigError, LockstepError
from lockstep.json_text import refused


def decode_config[Config](cls: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """Build a configuration from nested mappings."""
    with refused(where, "Correct it there."):
        checked = checked_values(cls, values, (), where)
        try:
            return typing.cast(Config, draccus.decode(cls, checked))
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
            of_values = [typing.get_args(kind)[1] for kind in kinds if typing.get_origin(kind) in (dict, Mapping)]
            _check_kind(value, kinds, path, where)
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
    lists = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) in (tuple, list)]
    if isinstance(value, list):
        _check_kind(value, kinds, path, where)
        items = tuple(item for arguments in lists for item in arguments if item is not Ellipsis)
        item_kind = typing.Union[items] if items else Any  # noqa: UP007 (of types that are known at run time alone)
        return [checked_values(item_kind, item, (*path, str(index)), where) for index, item in enumerate(value)]
    name = ".".join(path)
    if value is None and not {type(None), Any, object}.intersection(kinds):
        raise ConfigError(f"{where}: {name!r} is null (no value). Give it one, or remove the line for its default.")
    if isinstance(value, str) and len(lists) == len([kind for kind in kinds if kind is not type(None)]):
        if value and any(str in arguments for arguments in lists):
            return [value]
        raise ConfigError(f"{where}: {name!r} is the text {value!r}; it must be a list. Write [{value}].")
    if str in kinds and not {int, float, bool, Any}.intersection(kinds):
        if isinstance(value, bool):
            raise ConfigError(f"{where}: {name!r} is {value} to YAML; it must be a text. Put it in quotes.")
        return getattr(value, "source", value)
    _check_scalar(value, kinds, name, where)
    if isinstance(value, WrittenInteger | WrittenFloat):
        return int(value) if isinstance(value, int) else float(value)
    return value


def _check_kind(value: Any, kinds: Sequence[Any], path: tuple[str, ...], where: str) -> None:
    """Refuse a mapping or a list where neither goes, as the keys of a list, which draccus takes for its items."""
    if not (text := misfit(value, kinds)) or isinstance(value, Mapping) and any(map(choices_of, kinds)):
        return
    fix = "Put it in quotes if it is a text" if str in kinds else "Correct it"
    if isinstance(value, Mapping) and text.startswith("a list"):
        shown = ", ".join(map(str, value)) if set(value.values()) == {None} else "first, second"
        fix = f"Write all of it: [{shown}]"
    raise ConfigError(f"{where}: {'.'.join(path)!r} is {value!r:.80}; it must be {text}. {fix}.")


def _check_scalar(value: Any, kinds: Sequence[Any], name: str, where: str) -> None:
    """Refuse what draccus can make no number and no switch of."""
    scalars = [kind for kind in kinds if kind is not type(None)]
    if value is None or len(scalars) != 1 or scalars[0] not in (int, float, bool):
        return
    try:
        draccus.decode(scalars[0], value)
    except (ParsingError, TypeError, ValueError):
        text = getattr(value, "source", str(value))
        fix = "Correct it"
        if scalars[0] is int and (number := _whole(text)) is not None:
            fix = f"Write {number}"
        elif type(None) in kinds and text in ("auto", "none", "None"):
            fix = "Write null"
        raise ConfigError(f"{where}: {name!r} is {text!r:.80}; it must be {misfit([], kinds)}. {fix}.") from None


def _whole(text: str) -> int | None:
    """The whole number that somebody means by ``1e3``, ``1,000`` or ``1000.0``."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else None


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
        return [member for option in typing.get_args(kind) for member in _kinds(option)]
    return [kind]


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
    classes = [option for option in options_of(kind) if dataclasses.is_dataclass(option)]
    return typing.cast(type[Any], classes[0]) if len(classes) == 1 else None


def _suggest(word: str, known: typing.Iterable[str], noun: str) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(word[:80], known, n=1, cutoff=0.5)
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
