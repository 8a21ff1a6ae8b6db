"""Whether the installed packages fit together, by what each of them declares."""

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from typing import Final

from packaging.requirements import Requirement

from lockstep.main.doctor.finding import Finding

OURS: Final = "jax-lockstep"
SHOWN: Final = (OURS, "jax", "jaxlib", "libtpu", "marin-levanter")
"""The packages whose versions are shown."""
EXTRAS: Final = {OURS: ("tpu", "levanter", "gcs", "parquet"), "jax": ("tpu",), "marin-levanter": ()}
"""The packages whose requirements are checked, with the extras whose packages must fit where they are installed."""
TWICE: Final = {"haliax": "marin-haliax", "levanter": "marin-levanter"}
"""An older package, and the one that installs the same modules."""


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared_requirements(name: str) -> Sequence[str]:
    """What an installed package requires, as it declares it; nothing where it is not installed."""
    try:
        return importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def check_versions(
    version: Callable[[str], str | None] = installed_version,
    requirements: Callable[[str], Sequence[str]] = declared_requirements,
) -> list[Finding]:
    """Compare the installed packages with what lockstep, jax and Levanter require.

    Args:
        version: A function that gives the version of a package, None where it is not installed.
        requirements: A function that gives what a package requires.

    Returns:
        One finding that is ok, or one for each package that does not fit.
    """
    found, number = [], 0
    for name, extras in EXTRAS.items():
        for text in requirements(name):
            needed = Requirement(text)
            if needed.marker is not None and not any(needed.marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            optional = needed.marker is not None and not needed.marker.evaluate({"extra": ""})
            have = version(needed.name)
            if have is None and optional:
                continue
            number += 1
            wanted = f"{needed.name}{needed.specifier}"
            fix = f"pip install {wanted!r} in this environment."
            if have is None:
                found.append(Finding.to_fix("versions", f"{needed.name} is missing; {name} needs {wanted}.", fix))
            elif not needed.specifier.contains(have, prereleases=True):
                text = f"{needed.name} {have} is installed; {name} {version(name)} needs {wanted}."
                found.append(Finding.to_fix("versions", text, fix))
    for old, new in TWICE.items():
        if version(old) is not None and version(new) is not None:
            text = f"{old} {version(old)} and {new} {version(new)} install the same modules, over each other."
            fix = f"pip uninstall -y {old} {new}, then pip install {new}=={version(new)}."
            found.append(Finding.to_fix("versions", text, fix))
    if found:
        return found
    shown = [f"{name} {version(name)}" for name in SHOWN if version(name) is not None]
    text = f"{', '.join([*shown, f'Python {platform.python_version()}'])}; {number} requirements fit"
    if version(OURS) is None:
        fix = "pip install jax-lockstep in this environment, or ignore this in a source tree."
        text = f"{OURS} is not installed as a package, so its requirements are not known; {text}"
        return [Finding.warning("versions", text, fix)]
    return [Finding.ok("versions", text)]
