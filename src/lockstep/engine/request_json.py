"""Requests as values that JSON can express, so that the leader's can travel to the other hosts."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from lockstep.types import Drafts, Request, SamplingParams


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
    """
    return [
        Request(
            prompt_id=item["prompt_id"],
            prompt_tokens=tuple(item["prompt_tokens"]),
            params=SamplingParams(**{name: _tuples(value) for name, value in item["params"].items()}),
            drafts=item["drafts"] and Drafts(**{name: _tuples(value) for name, value in item["drafts"].items()}),
        )
        for item in items
    ]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
