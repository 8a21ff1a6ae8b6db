"""JSON that others wrote: whatever is wrong with it is one error, of ours, that names its place."""

import collections.abc
import contextlib
import dataclasses
import functools
import json
import types
import typing
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from lockstep.errors import ConfigError, HostError, LockstepError

_NAMES: Final[dict[type, str]] = {dict: "an object", list: "a list"}
FOREIGN: Final = "It comes from a process of another version, or from somebody else (docs/security.md)."
"""The fix for a message of another process that cannot be read."""
_POINTER: Final = b"version https://git-lfs"
_SHOWN: Final = 300  # characters of what Python says of a value; some errors have all of it


_BEGINNINGS = {
    **{b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PK\3\4": "a zip archive", b"BZh": "bzip2"},
    **{b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"},
}


def not_utf8(error: UnicodeDecodeError) -> str:
    """The end of a sentence about a text that is not UTF-8, which names what else it begins as."""
    kind = next((kind for start, kind in _BEGINNINGS.items() if error.object.startswith(start)), "")
    return f"is not UTF-8, it begins as {kind} does" if kind else f"is not UTF-8: {error}"


class _TwiceError(Exception):
    """A key that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _TwiceError(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return made


def parse_json[Found](
    text: str | bytes,
    place: str,
    kind: type[Found],
    fix: str,
    error: type[LockstepError] = ConfigError,
    *,
    unique: bool = False,
) -> Found:
    """Parse a JSON text.

    Args:
        place: Where it is from, for the error.
        fix: What to do where it cannot be read, a sentence.
        unique: Whether an object that has a key twice is refused; Python's parser takes the last.

    Raises:
        LockstepError: It is no JSON, nested too deeply for Python's parser, or of another type.
    """
    try:
        parsed: Any = json.loads(text, object_pairs_hook=_object if unique else None)
    except _TwiceError as twice:
        raise error(f"{place} has the key {twice.args[0]!r:.80} twice in one object. Remove one of them.") from None
    except RecursionError:
        raise error(f"{place} is JSON that is nested too deeply to be read. {fix}") from None
    except UnicodeDecodeError as wrong:
        raise error(f"{place} {not_utf8(wrong)}. {fix}") from None
    except ValueError as wrong:  # numbers with more digits than Python reads, too
        raise error(f"{place} {pointer_text(text) or f'is not JSON: {wrong}. {fix}'}") from None
    if not isinstance(parsed, kind):
        raise error(f"{place} is a JSON {type(parsed).__name__}, not {_NAMES.get(kind, kind.__name__)}. {fix}")
    return parsed


def pointer_text(text: str | bytes | bytearray) -> str:
    """The rest of a sentence on a file that git has left a pointer for, for an error; empty where it is no pointer."""
    if (text[: len(_POINTER)].encode(errors="replace") if isinstance(text, str) else text[: len(_POINTER)]) != _POINTER:
        return ""
    return "is a pointer of Git LFS, not the file itself. Run git lfs pull where it was cloned, or download it."


def lone_surrogate(text: str) -> str:
    """Half a surrogate pair in a text, for an error; empty where there is none. JSON can have one (an emoji that was
    cut), UTF-8 and tokenizers cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a surrogate pair, {text[error.start]!r}"
    return ""


def without_nulls(value: Any) -> Any:
    """A JSON value without the keys whose value is null. Arrow, and JSON that was written from it, has in each object
    the keys of all objects of its column, with nulls where there was none.
    """
    if isinstance(value, collections.abc.Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


@contextlib.contextmanager
def refused(place: str, fix: str, error: type[LockstepError] = ConfigError) -> Iterator[None]:
    """Raise what the block stumbles over in values that others wrote as one error of ours.

    Args:
        place: Where the values are from, for the error.
        fix: What to do where they cannot be used, a sentence.

    Raises:
        LockstepError: A value is missing, of another type, or out of its range.
    """
    try:
        yield
    except LockstepError as wrong:
        if isinstance(wrong, error):
            raise
        raise error(str(wrong)) from wrong
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as wrong:
        why = f"{type(wrong).__name__}: {wrong}"[:_SHOWN]
        raise error(f"{place} cannot be read ({why}). {fix}") from wrong


def from_peer[Kind](data: str | bytes, kind: type[Kind], place: str) -> Kind:
    """The parsed message of another process: whoever reaches the coordination service can send something else.

    Raises:
        HostError: It is something else.
    """
    with refused(place, FOREIGN, HostError):
        return typed(kind, parse_json(data, place, object, FOREIGN, HostError))


def typed[Kind](kind: type[Kind], value: Any, name: str = "it") -> Kind:
    """A JSON value as an annotation says: a dataclass from its fields, a tuple from a list. An array stays one.

    Raises:
        TypeError: It is something else, or a number of more than 63 bits.
        LockstepError: The dataclass refuses it.
    """
    annotation: Any = kind
    while isinstance(annotation, typing.TypeAliasType):
        annotation = annotation.__value__
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    checked: Any = value
    if annotation in (Any, object):
        return checked
    if dataclasses.is_dataclass(annotation) and isinstance(value, dict):
        hints = _hints(typing.cast(type, annotation))
        if all(key in hints for key in value):
            return kind(**{key: typed(hints[key], inside, key) for key, inside in value.items()})
    elif origin in (typing.Union, types.UnionType):
        for option in inner:
            with contextlib.suppress(TypeError):
                return typing.cast(Kind, typed(option, value, name))
    elif origin is typing.Literal:
        if any(type(value) is type(choice) and value == choice for choice in inner):
            return checked
    elif origin in (list, tuple, collections.abc.Sequence) and isinstance(value, list | tuple):
        if origin is tuple and inner[1:] != (...,):
            if len(inner) == len(value):
                return typing.cast(Kind, tuple(typed(*pair, name) for pair in zip(inner, value, strict=True)))
        else:
            # Prompts have a hundred thousand numbers.
            plain = inner[0] is int and set(map(type, value)) == {int} and -(2**63) <= min(value) <= max(value) < 2**63
            made = list(value) if plain else [typed(inner[0], item, name) for item in value]
            return typing.cast(Kind, made if origin is list else tuple(made))
    elif origin in (dict, collections.abc.Mapping) and isinstance(value, dict):
        return typing.cast(Kind, {key: typed(inner[1], inside, name) for key, inside in value.items()})
    elif annotation in (int, float) and type(value) in (int, annotation):
        if isinstance(value, float) or -(2**63) <= value < 2**63:
            return checked
    elif type(value) is annotation:
        return checked
    raise TypeError(f"{name} is {value!r:.80}, which is not {getattr(kind, '__name__', kind)}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in names}
