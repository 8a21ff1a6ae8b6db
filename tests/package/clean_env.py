"""An environment with a wheel, the packages that it asks for, what those ask for in turn, and nothing else.

The packages are links to those of the environment that the tests run in, so it takes a second and no network. That pip
finds them all is the nightly test's, and the release's, which install for real.
"""

import importlib.metadata
import subprocess
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def asked_for(requires: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed packages that some requirements lead to, by name."""
    todo = [(Requirement(text), "") for text in requires]
    seen: set[tuple[str, str]] = set()
    found = {}
    while todo:
        one, extra = todo.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        distribution = importlib.metadata.distribution(one.name)
        for each in ("", *one.extras):
            if (place := (canonicalize_name(one.name), each)) not in seen:
                seen.add(place)
                todo += [(Requirement(text), each) for text in distribution.requires or ()]
        found[canonicalize_name(one.name)] = distribution
    return found


def metadata_of(wheel: Path) -> importlib.metadata.PathDistribution:
    """What a wheel says of itself."""
    (info,) = [each for each in zipfile.Path(wheel).iterdir() if each.name.endswith(".dist-info")]
    return importlib.metadata.PathDistribution(info)


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Put the files of a package into the packages of another environment, but for its commands.

    With the bytecode that is there: to make that of JAX and transformers anew takes longer than the tests.
    """
    for file in distribution.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            place, original = site / file, Path(str(distribution.locate_file(file))).resolve()
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(original)
            if file.suffix == ".py" and (made := Path(cache_from_source(str(original)))).exists():
                cached = Path(cache_from_source(str(place)))
                cached.parent.mkdir(exist_ok=True)
                cached.symlink_to(made)


def make_clean_env(wheel: Path, home: Path) -> Path:
    """Make the environment.

    Returns:
        Its directory of programs.
    """
    venv.create(home, with_pip=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    for distribution in asked_for(metadata_of(wheel).requires or ()).values():
        link(distribution, site)
    pip = [str(home / "bin" / "python"), "-m", "pip"]
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *install, str(wheel)], check=True)
    subprocess.run([*pip, "check"], check=True)
    return home / "bin"
