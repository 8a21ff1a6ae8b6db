"""scripts/setup.sh on machines of several kinds; interpreters and uv are scripts that say what they were asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("awk", "bash", "cat", "chmod", "cksum", "dirname", "mkdir", "rm", "sh")
PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) echo {version} ;;
  *"ensurepip, venv"*) ;;
  "-m venv "*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  "-m pip install"*" --target build/uv "*) echo "$*" >> asked; mkdir -p build/uv/bin; cp "$HOME/uv" build/uv/bin/uv ;;
  *) echo "$*" >> asked ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >> asked
[ "$1" != venv ] || [ -z "{refuses}" ] || exit 2
for last; do :; done
[ "$1" != venv ] || { mkdir -p "$last/bin"; cp "$HOME/python3.12" "$last/bin/python"; }
"""


class Machine:
    """A clone in a folder whose name has spaces, and a PATH with the named interpreters alone."""

    def __init__(self, directory: Path, refuses: str = "") -> None:
        self.clone, self.programs = directory / "my clone", directory / "bin"
        (self.clone / "scripts").mkdir(parents=True)
        self.programs.mkdir()
        for name in ("scripts/setup.sh", "pyproject.toml", "hashes.txt"):
            shutil.copy(ROOT / name, self.clone / name)
        for name in (*TOOLS, "cp"):
            (self.programs / name).symlink_to(str(shutil.which(name)))
        self._write(directory / "uv", UV.replace("{refuses}", refuses))
        self._write(directory / "python3.12", PYTHON.format(version="3.12"))

    @staticmethod
    def _write(file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)

    def add(self, name: str, version: str) -> None:
        self._write(self.programs / name, PYTHON.format(version=version))

    def setup(self, *words: str, code: int = 0) -> tuple[str, list[str]]:
        """What it says, and what interpreters and uv were asked."""
        done = subprocess.run(
            ["bash", "scripts/setup.sh", *(words or ("dev", "plan"))],
            cwd=self.clone, capture_output=True, text=True, timeout=60,
            env={"PATH": str(self.programs), "HOME": str(self.programs.parent)},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        asked = self.clone / "asked"
        return done.stdout + done.stderr, asked.read_text(encoding="utf-8").splitlines() if asked.exists() else []


def test_an_old_python_is_enough(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("python3", "3.8")
    said, asked = machine.setup()
    assert "there is no Python 3.12 3.13 3.14; installing uv in build/uv" in said and "setup: done in" in said
    by_hash = next(line for line in asked if "--target build/uv" in line)
    assert "--require-hashes --no-deps" in by_hash
    pins = (machine.clone / "build" / "uv.txt").read_text(encoding="utf-8").splitlines()
    assert pins[0].startswith("uv==") and all("--hash=sha256:" in line for line in pins[1:]) and len(pins) > 5
    assert "uv venv --quiet --python 3.12 .venv" in asked
    (install,) = (line for line in asked if line.startswith("uv pip install"))
    assert " -c hashes.txt --build-constraint hashes.txt " in install and install.endswith(" -e .[dev,plan]")
    os.remove(machine.clone / "asked")
    assert machine.setup() == ("", []), "the second time there is nothing to do"
    shutil.rmtree(machine.clone / "build")
    said, asked = machine.setup("--uv")
    assert said == "build/uv/bin/uv\n", "scripts/test_versions.sh installs with it"
    assert len(asked) == 1 and "--require-hashes --no-deps" in asked[0]


@pytest.mark.parametrize("name", ["python3.13", "python3", "python"])
def test_a_python_that_is_supported_is_used(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path)
    machine.add(name, "3.13")
    said, asked = machine.setup()
    assert f"making .venv with {machine.programs / name}" in said
    assert not any(line.startswith("uv venv") for line in asked)


def test_without_a_way_to_a_python_it_says_what_to_do(tmp_path: Path) -> None:
    for name, refuses in (("python3", "yes"), ("perl", "")):
        machine = Machine(tmp_path / name, refuses)
        machine.add(name, "3.8")
        said, _ = machine.setup(code=1)
        assert "setup: Python 3.12 3.13 3.14 is missing, and uv could not" in said and "apt install python3.12" in said
