"""Why a configuration cannot run: the number that is too large, the largest that works, and where to change it."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Infeasibility:
    """One reason.

    Args:
        key: of the configuration, with dots; ``topology`` for the slice itself.
        value: as given, or as it follows from the defaults.
        largest: value of ``key`` that works; None if none does.
        text: the whole reason.
        place: ``file:line`` of the key, or of where to add it.
    """

    key: str
    value: Any
    largest: Any
    text: str
    place: str = ""


class InfeasibleError(Exception):
    """Carries an `Infeasibility` up."""

    def __init__(self, refusal: Infeasibility) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


def agreeing(refusals: Sequence[Infeasibility]) -> list[Infeasibility]:
    """Of a key that is refused for several reasons, the largest value that works is the one that works for all."""
    found: dict[str, list[Any]] = {}
    for refusal in refusals:
        found.setdefault(refusal.key, []).append(refusal.largest)
    least = {key: None if None in largest else min(largest) for key, largest in found.items()}
    return [dataclasses.replace(refusal, largest=least[refusal.key]) for refusal in refusals]


def place_of(path: Path | None, key: str, overrides: Sequence[str] = ()) -> str:
    """Where a key is set.

    Args:
        path: the YAML file; None for none.
        key: with dots.
        overrides: keys that were given on the command line, which win.

    Returns:
        ``file:line``; of the innermost block that is there, and that the key is to be added, if the key is not.
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
        text: of an error.
    """
    found = re.search(r"to at most (\d[\d,]*)", text)
    return int(found[1].replace(",", "")) if found else None


def key_in(text: str, keys: Mapping[str, str]) -> str | None:
    """The first configuration key that a message names.

    Args:
        text: of an error.
        keys: name as messages have it to key with dots.
    """
    found = [(text.index(name), key) for name, key in keys.items() if name in text]
    return min(found)[1] if found else None
