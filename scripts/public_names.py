"""The public names with the names of their arguments, fields and methods, and those that a changelog must mention.

``python -m scripts.public_names`` writes tests/golden/public_names.txt anew: in the commit of a release. The
extras levanter and tunix must be installed.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.models.layer_kinds import KindsOfLayers
from scripts import make_api_docs

FILE = Path(__file__).resolve().parents[1] / "tests" / "golden" / "public_names.txt"


def arguments(function: object) -> str:
    """The names of the arguments of a function or class; a default is an equals sign."""
    if not callable(function):
        return ""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a type of C
        return "(...)"
    optional = inspect.Parameter.empty
    return f"({', '.join(each.name + '=' * (each.default is not optional) for each in parameters)})"


def members(cls: type) -> dict[str, object]:
    """What a class defines, with what it has of `KindsOfLayers`, which is no public name."""
    parts = (vars(part) for part in (KindsOfLayers, cls) if part is cls or part in cls.__bases__)
    return {name: value for part in parts for name, value in part.items()}


def lines() -> Iterator[str]:
    """A line for each public name, and one for each public member of a class."""
    for name in make_api_docs.public_names():
        thing = make_api_docs.find(name)
        yield name + arguments(thing)
        for member, value in sorted(members(thing).items()) if inspect.isclass(thing) else ():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod)):
                yield f"{name}.{member}" + (arguments(value) if inspect.isfunction(value) else "")


def unmentioned(released: set[str], present: set[str], changelog: str) -> list[str]:
    """The lines of names that came, went or changed, and that no backticks of the changelog mention.

    Args:
        released: The lines of the last release.
        present: Those of now.
        changelog: The section of what is not released.
    """
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", changelog))))
    return sorted(line for line in released ^ present if line.partition("(")[0].rpartition(".")[2] not in words)


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in sorted(lines())), encoding="utf-8")
