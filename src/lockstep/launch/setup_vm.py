"""This package, as it is here, on a machine that has none: a wheel, and the script that installs it there.

Each version has a directory of its own on the machine, so that a second start installs nothing.
"""

import dataclasses
import functools
import hashlib
import os
import shlex
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

from lockstep.exits import SETUP_FAILED
from lockstep.files import write_file
from lockstep.launch.backend import LaunchError
from lockstep.launch.tool import Cause, Tool

ROOT: Final = Path(__file__).resolve().parents[3]  # the checkout that this module is part of, if it is part of one
UV_VERSION: Final = "0.13.9"
UV_HASHES: Final = (
    "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",  # x86_64
    "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe",  # aarch64
    "ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375",  # aarch64, newer glibc
)
"""SHA-256 of the wheels of this version for Linux machines."""
PYTHON_VERSION: Final = "3.12"
EXTRAS: Final = "tpu,gcs,wandb,parquet"
"""The optional dependencies of a run whose configuration names a bucket, W&B and a dataset of the Hugging Face hub."""
PINS: Final = "hashes.txt"  # the versions that are installed, with the hashes of their files, which uv compares
HOME: Final = ".lockstep"  # the directory below a machine's home in which versions are installed
BUILD_S: Final = 600.0  # seconds that building the wheel may take

# Run by `sh` in a directory with the wheel and constraints.txt. A version is there once `ready` is: what an interrupted
# installation left is removed by the next one. The lock is the kernel's, so it ends with its process.
SCRIPT: Final = """\
set -eu
version=@VERSION@
requirement=@REQUIREMENT@
base="$HOME/.lockstep"
home="$base/versions/$version"
say() { printf 'setup: %s\\n' "$*"; }

if [ -e "$home/ready" ]; then say "$version is there already"; exit 0; fi
mkdir -p "$base/versions"
exec 9>"$base/setup.lock"
if ! flock -w 1200 9; then say "another installation has held $base/setup.lock for 20 minutes"; exit 1; fi
if [ -e "$home/ready" ]; then say "$version is there already"; exit 0; fi

uv="$(command -v uv || true)"
if [ -z "$uv" ]; then
  say "installing uv @UV_VERSION@"
  # By its hash: what runs next is the file that was looked at when the hash was written down, or nothing.
  printf '@UV@\\n' >uv.txt
  if ! python3 -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \\
    --upgrade --target "$base/uv" -r uv.txt; then
    say "uv could not be installed; pip says why above. Without a way to the internet, give the network Cloud NAT, or"
    say "the machines external addresses, or prepare an image with the package and pass --venv. Without pip, install"
    say "python3-pip or uv there."
    exit 1
  fi
  uv="$base/uv/bin/uv"
fi

say "installing $version"
rm -rf "$home"
mkdir "$home"
"$uv" venv --quiet --python @PYTHON_VERSION@ "$home/venv"
"$uv" pip install --quiet --python "$home/venv/bin/python" --prerelease allow \\
  --only-binary :all: --constraint constraints.txt "$requirement"
"$home/venv/bin/lockstep" --help >/dev/null
date >"$home/ready.new"
mv "$home/ready.new" "$home/ready"
say "$version is ready"
"""


# Isolated, pip would fetch any setuptools and run it.
PIP_BUILD: Final = f"""\
set -e
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
awk '/^setuptools==/ {{ pin = 1 }} pin {{ print }} pin && !/\\\\$/ {{ exit }}' "$1/{PINS}" >"$tools/setuptools.txt"
pip="$0 -m pip --quiet --disable-pip-version-check"
$pip install --require-hashes --no-deps --only-binary :all: --target "$tools" -r "$tools/setuptools.txt"
PYTHONPATH="$tools" $pip wheel --no-deps --no-build-isolation --wheel-dir "$2" "$1"
"""
"""A shell script: the Python, the source and the directory of the wheel are its arguments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Version:
    """The state of a checkout."""

    name: str  # the version, the commit and, if files differ from it, a digest of them
    changed: bool


@functools.cache
def version_of(root: Path = ROOT) -> Version:
    """Return the state of a checkout; it does not change while the launcher runs."""
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        raise LaunchError(
            f"{root} is not a checkout of lockstep, so there is no source to bring to the machines. Run the launcher "
            "from a clone, or prepare an image with the package and pass --venv DIR or --setup none.",
            SETUP_FAILED,
        )
    commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
    changes = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *_INSTALLED)
    name = f"{_number(root)}-{commit}"
    return Version(name=f"{name}-changed-{_digest(root)}" if changes else name, changed=bool(changes))


def wheel_path(root: Path, version: Version) -> Path:
    """Return where the wheel of a checkout is kept once it is built."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lockstep" / "wheels" / version.name / f"jax_lockstep-{_number(root)}-py3-none-any.whl"


def build_wheel(root: Path, version: Version) -> Path:
    """Build the wheel of a checkout, once for each version, and return its file."""
    path = wheel_path(root, version)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not in the checkout: setuptools keeps files of earlier builds in its build directory and packs them too.
        with tempfile.TemporaryDirectory(prefix="lockstep-wheel-") as temporary:
            source, out = Path(temporary) / "source", Path(temporary) / "out"
            for file in _files(root):
                (source / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, source / file)
            BUILDER.run(build_command(source, out))
            write_file(path, (out / path.name).read_bytes())
    return path


def build_command(source: Path, out: Path) -> list[str]:
    """Return the command that builds a wheel with the setuptools of `PINS`: with uv if it is there, else with pip."""
    if shutil.which("uv"):
        words = ["uv", "build", "--quiet", "--wheel", "--out-dir", str(out), str(source)]
        return [*words, "--build-constraint", str(source / PINS)]
    return ["sh", "-c", PIP_BUILD, sys.executable, str(source), str(out)]


def script(version: Version, wheel_name: str, extras: str) -> str:
    """Return the shell script that installs a wheel beside it; a second run finds nothing to do."""
    values = {
        "VERSION": shlex.quote(version.name),
        # A path that begins with ./ is a file to uv, whatever its name.
        "REQUIREMENT": shlex.quote(f"./{wheel_name}" + (f"[{extras}]" if extras else "")),
        "UV_VERSION": UV_VERSION,
        "UV": uv_requirement(),
        "PYTHON_VERSION": PYTHON_VERSION,
    }
    text = SCRIPT
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def uv_requirement() -> str:
    """The version of uv and the hashes of its files, as ``pip --require-hashes`` reads them."""
    return f"uv=={UV_VERSION}" + "".join(f" --hash=sha256:{digest}" for digest in UV_HASHES)


def programs(version: Version) -> str:
    """Return the directory on a machine with the programs of a version; ``~`` is the machine's home."""
    return f"~/{HOME}/versions/{version.name}/venv/bin"


_INSTALLED: Final = ("src", "pyproject.toml", "README.md", "LICENSE", "constraints.txt", PINS)
"""The files that make a difference on a machine."""


def _number(root: Path) -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def _files(root: Path) -> list[str]:
    """The files of `_INSTALLED` that git has or does not ignore."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_INSTALLED)
    return sorted(file for file in set(listed.split("\0")) if file and (root / file).is_file())


def _digest(root: Path) -> str:
    total = hashlib.sha256()
    for file in _files(root):
        total.update(f"{file} {(root / file).stat().st_size}\n".encode())
        total.update((root / file).read_bytes())
    return total.hexdigest()[:10]


NO_GIT: Final = Cause(
    summary="there is no git, which knows the version and the files of {root}",
    advice="Install git, or prepare an image with the package and pass --venv DIR or --setup none",
    code=SETUP_FAILED,
)
GIT_FAILED: Final = Cause(
    summary="git failed in {root}", advice="Run the command by hand to see more", code=SETUP_FAILED
)
GIT: Final = Tool(missing=NO_GIT, unknown=GIT_FAILED, limit_s=60.0)
NO_WHEEL: Final = Cause(
    summary="the wheel of lockstep cannot be built",
    advice="Install uv (https://docs.astral.sh/uv), or run the launcher with a Python that has pip",
    code=SETUP_FAILED,
)
BUILDER: Final = Tool(missing=NO_WHEEL, unknown=NO_WHEEL, limit_s=BUILD_S, own_session=False)


def _git(root: Path, *words: str) -> str:
    return GIT.run(["git", "-C", str(root), *words], {"root": str(root)})
