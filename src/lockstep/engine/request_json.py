"""Requests as values that JSON can express, so that the leader's can travel to the other hosts."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from lockstep.errors import HostError, LockstepError
from lockstep.types import Drafts, Request, SamplingParams

_FOREIGN = "they come from a process of another version, or from somebody else (docs/security.md)."


def requests_to_json(requests: Iterable[Request]) -> list[dict[str, Any]]:
    """Requests as plain values: token ids and parameters, no text.

    Args:
        requests: The requests.
    """
    return [dataclasses.asdict(request) for request in requests]


def requests_from_json(items: Iterable[dict[str, Any]]) -> list[Request]:
    """The requests that `requests_to_json` was given.

    Args:
        items: Its result, also after a way through JSON, which has lists where requests have tuples.

    Raises:
        HostError: It is something else.
    """
    try:
        return [
            Request(
                prompt_id=item["prompt_id"],
                prompt_tokens=tuple(item["prompt_tokens"]),
                params=SamplingParams(**{name: _tuples(value) for name, value in item["params"].items()}),
                drafts=item["drafts"] and Drafts(**{name: _tuples(value) for name, value in item["drafts"].items()}),
            )
            for item in items
        ]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, LockstepError):
            raise
        raise HostError(f"the leader's requests cannot be read ({type(error).__name__}: {error}): {_FOREIGN}") from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
