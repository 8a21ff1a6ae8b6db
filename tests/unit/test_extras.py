"""The pins of constraints.txt fit together for every combination of extras, Levanter's for TPUs among them.

Read from what the installed packages say that they need, so nothing is downloaded.
"""

import functools
import importlib.metadata
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().split())
}
BESIDE = "marin-levanter[tpu]"
"""What is installed beside ours on a TPU where Levanter trains."""
WANTED = [*PROJECT["optional-dependencies"], BESIDE]


@functools.cache
def needs(name: str, extra: str) -> list[str]:
    """The requirements of a package with an extra ("" for none), where it is installed in its pinned version."""
    if name == PROJECT["name"]:
        return PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    # What `make test` installs has the pins. The requirements of other versions say nothing about the pins.
    if found.version != PINS.get(canonicalize_name(name)):
        pytest.skip(f"{name} {found.version} is installed, which constraints.txt does not pin: make setup-tests")
    requirements = [Requirement(text) for text in found.requires or []]
    without = {str(one) for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})}
    chosen = {str(one) for one in requirements if one.marker is None or one.marker.evaluate({"extra": extra})}
    return sorted(chosen - without if extra else without)


def requirements(texts: list[str]) -> Iterator[Requirement]:
    """All requirements of these and of what they need in turn."""
    todo, seen = [Requirement(text) for text in texts], set()
    while todo:
        one = todo.pop()
        yield one
        for extra in ("", *one.extras):
            if (place := (canonicalize_name(one.name), extra)) not in seen:
                seen.add(place)
                todo += map(Requirement, needs(one.name, extra))


def conflicts(texts: list[str], pins: Mapping[str, str] = PINS) -> list[str]:
    """What some pins do not satisfy of all that these requirements need."""
    found = []
    for one in requirements(texts):
        pin = pins.get(canonicalize_name(one.name))
        if pin is not None and not one.specifier.contains(pin, prereleases=True):
            found.append(f"{one} against {one.name}=={pin}")
    return found


def ours(extra: str) -> list[str]:
    return [PROJECT["name"], BESIDE] if extra == BESIDE else [f"{PROJECT['name']}[{extra}]"]


@pytest.mark.parametrize("extra", WANTED)
def test_every_extra_resolves_to_the_pins(extra):
    """Each extra does, to one set of pins, so every combination of them does too."""
    assert not conflicts(ours(extra))


@pytest.mark.parametrize("extra", ["tpu", "plan", BESIDE])
def test_extras_for_tpus_bring_the_pinned_libtpu_and_no_other(extra):
    assert any(one.name == "libtpu" for one in requirements(ours(extra)))
    other = PINS | {"libtpu": "0.0.48.1"}
    assert any("against libtpu==0.0.48.1" in text for text in conflicts(ours(extra), other))
