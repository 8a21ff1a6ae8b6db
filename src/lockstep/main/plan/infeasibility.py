"""Why a configuration cannot run: the number that is too large, the largest that works, and where to change it."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Infeasibility:
    """One reason why a configuration cannot run.

    Args:
        key: The configuration key to change, with dots; ``topology`` for the slice itself.
        value: The value of ``key``, as given or as it follows from the defaults.
        largest: The largest value of ``key`` that works; None: none does.
        text: The whole reason.
        place: The ``file:line`` of the key, or of where to add it.
    """

    key: str
    value: Any
    largest: Any
    text: str
    place: str = ""


class InfeasibleError(Exception):
    """An `Infeasibility`, raised where it is found.

    Args:
        infeasibility: The reason.
    """

    def __init__(self, infeasibility: Infeasibility) -> None:
        super().__init__(infeasibility.text)
        self.infeasibility = infeasibility


def with_common_largest(infeasibilities: Sequence[Infeasibility]) -> list[Infeasibility]:
    """The same reasons; those that name the same key get the largest value that works for all of them.

    Args:
        infeasibilities: The reasons, each with the largest value that works for it alone.
    """
    found: dict[str, list[Any]] = {}
    for each in infeasibilities:
        found.setdefault(each.key, []).append(each.largest)
    least = {key: None if None in largest else min(largest) for key, largest in found.items()}
    return [dataclasses.replace(each, largest=least[each.key]) for each in infeasibilities]


def place_of(path: Path | None, key: str, overrides: Sequence[str] = ()) -> str:
    """Where a key is set.

    Args:
        path: The YAML file; None: there is none.
        key: The key, with dots.
        overrides: The keys that were given on the command line, which win over the file.

    Returns:
        ``file:line`` of the key. Where the file does not have the key, that of the innermost block around it that the
        file has, and what to add there.
    """
    if key in overrides:
        return f"--{key} on the command line"
    if path is None:
        return f"--{key}"
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line, missing = 1, key
    parts = key.split(".")
    for depth, part in enumerate(parts):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((name, value) for name, value in entries if name.value == part), None)
        if found is None:
            missing = ".".join(parts[depth:])
            above = ".".join(parts[:depth])
            return f"{path}:{line} (add {missing}{f' to {above}' if above else ''})"
        line, node = found[0].start_mark.line + 1, found[1]
    return f"{path}:{line}"


def largest_in(text: str) -> int | None:
    """The bound that a message gives a number which is too large: ``Set it to at most 8192``.

    Args:
        text: The text of an error.

    Returns:
        The bound; None where the message has none.
    """
    found = re.search(r"to at most (\d[\d,]*)", text)
    return int(found[1].replace(",", "")) if found else None


def key_in(text: str, keys: Mapping[str, str]) -> str | None:
    """The first configuration key that a message names.

    Args:
        text: The text of an error.
        keys: The key with dots, by the name that messages have for it.

    Returns:
        The key with dots; None where the message names none.
    """
    found = [(text.index(name), key) for name, key in keys.items() if name in text]
    return min(found)[1] if found else None
