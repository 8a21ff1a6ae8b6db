"""JSON that others wrote: whatever is wrong with it is one error, of ours, that names its place."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

from lockstep.errors import ConfigError, LockstepError

_NAMES: Final[dict[type, str]] = {dict: "an object", list: "a list"}
_SHOWN: Final = 300
"""Characters of what Python says of a value; some errors have all of it."""


def parse_json[Found](
    text: str | bytes, place: str, kind: type[Found], fix: str, error: type[LockstepError] = ConfigError
) -> Found:
    """Parse a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        place: Where it is from, for the error.
        kind: The type that it must have: dict, list, …
        fix: What to do where it cannot be read, a sentence.
        error: What is raised.

    Raises:
        LockstepError: It is no JSON, nested too deeply for Python's parser, or of another type.
    """
    try:
        found: Any = json.loads(text)
    except RecursionError:
        raise error(f"{place} is JSON that is nested too deeply to be read. {fix}") from None
    except UnicodeDecodeError as wrong:
        raise error(f"{place} is not UTF-8: {wrong}. {fix}") from None
    except ValueError as wrong:  # numbers with more digits than Python reads, too
        raise error(f"{place} is not JSON: {wrong}. {fix}") from None
    if not isinstance(found, kind):
        raise error(f"{place} is a JSON {type(found).__name__}, not {_NAMES.get(kind, kind.__name__)}. {fix}")
    return found


@contextlib.contextmanager
def refused(place: str, fix: str, error: type[LockstepError] = ConfigError) -> Iterator[None]:
    """Raise what the block stumbles over in values that others wrote as one error of ours.

    Args:
        place: Where the values are from, for the error.
        fix: What to do where they cannot be used, a sentence.
        error: What is raised.

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
