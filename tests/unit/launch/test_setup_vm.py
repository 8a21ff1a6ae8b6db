"""This package on a machine: the version of a checkout, its wheel, and the script (which the backend's tests run)."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lockstep.exits import SETUP_FAILED
from lockstep.launch import setup_vm
from lockstep.launch.backend import LaunchError
from tests.fake_cloud.commands import write_command
from tests.fake_cloud.shellcheck import shellcheck
from tests.git import needs_git


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small repository with one commit; versions are not remembered between calls."""
    root = tmp_path / "checkout"
    (root / "src" / "lockstep").mkdir(parents=True)
    for name, text in (
        ("pyproject.toml", '[project]\nname = "jax-lockstep"\nversion = "1.2.3"\n'),
        ("src/lockstep/a.py", "A = 1\n"),
        ("constraints.txt", "jax==0.1\n"),
        ("notes.md", "notes\n"),
        (".gitignore", "build/\n*.pyc\n"),
    ):
        (root / name).write_text(text)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    monkeypatch.setattr(setup_vm, "version_of", setup_vm.version_of.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def commit(root: Path) -> str:
    words = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@needs_git
def test_a_version_is_the_commit_and_what_differs_from_it(checkout):
    clean = setup_vm.version_of(checkout)
    assert clean == setup_vm.Version(name=f"1.2.3-{commit(checkout)}", changed=False)
    (checkout / "notes.md").write_text("other notes\n")
    (checkout / "src" / "lockstep" / "a.pyc").write_text("ignored")
    assert setup_vm.version_of(checkout) == clean, "what is not installed makes no version"
    (checkout / "src" / "lockstep" / "b.py").write_text("B = 1\n")
    first = setup_vm.version_of(checkout)
    assert first.changed and first.name.startswith(f"{clean.name}-changed-")
    (checkout / "src" / "lockstep" / "b.py").write_text("B = 2\n")
    second = setup_vm.version_of(checkout)
    assert second.name != first.name
    (checkout / "src" / "lockstep" / "b.py").write_text("B = 1\n")
    assert setup_vm.version_of(checkout) == first
    assert setup_vm.programs(first) == f"~/.lockstep/versions/{first.name}/venv/bin"


def test_what_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(LaunchError, match=r"is not a checkout of lockstep.*--venv DIR") as caught:
        setup_vm.version_of.__wrapped__(tmp_path)
    assert caught.value.code == SETUP_FAILED


UV = """#!/bin/sh
echo "$@" >> LOG
ls -R "$6" > SEEN
[ ! -e BROKEN ] || { echo "error: broken build"; exit 2; }
mkdir -p "$5" && echo wheel > "$5/jax_lockstep-1.2.3-py3-none-any.whl"
"""


@needs_git
def test_a_wheel_is_built_once_from_what_git_knows(checkout, tmp_path, monkeypatch):
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    text = UV
    for name in ("LOG", "SEEN", "BROKEN"):
        text = text.replace(name, str(tmp_path / name.lower()))
    uv.write_text(text)
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=":")
    (checkout / "src" / "lockstep" / "new.py").write_text("")
    (checkout / "build").mkdir()
    (checkout / "build" / "left_over.py").write_text("")
    version = setup_vm.version_of(checkout)
    for _ in range(2):
        path = setup_vm.build_wheel(checkout, version)
        assert path.read_text() == "wheel\n" and path == setup_vm.wheel_path(checkout, version)
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    seen = (tmp_path / "seen").read_text()
    assert "new.py" in seen and "a.py" in seen and "left_over" not in seen and "notes.md" not in seen
    assert not [each for each in path.parent.iterdir() if each != path], "nothing half made is left"
    (tmp_path / "broken").touch()
    (checkout / "src" / "lockstep" / "new.py").write_text("changed")
    with pytest.raises(LaunchError, match=r"(?s)cannot be built.*\$ uv build.*error: broken build.*Install uv"):
        setup_vm.build_wheel(checkout, setup_vm.version_of(checkout))


def test_without_git_it_says_what_else_there_is(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"there is no git, which knows the version(?s:.*)Install git, or .*--setup none"
    ) as caught:
        setup_vm.version_of(tmp_path)
    assert caught.value.code == SETUP_FAILED


def test_without_uv_pip_builds_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    command = setup_vm.build_command(Path("/s"), Path("/o"))
    assert command[:2] == ["sh", "-c"] and command[-3:] == [sys.executable, "/s", "/o"]
    shellcheck(f"#!/bin/sh\n{setup_vm.PIP_BUILD}")


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_what_builds_the_wheel_is_a_file_of_a_known_hash(tool, tmp_path, monkeypatch):
    """Isolated, pip and uv fetch whatever setuptools an index has, and run it."""
    monkeypatch.setattr(shutil, "which", lambda name: tool if tool == "uv" else None)
    command = setup_vm.build_command(setup_vm.ROOT, tmp_path)
    if tool == "uv":
        assert command[-2:] == ["--build-constraint", str(setup_vm.ROOT / "hashes.txt")]
        return
    notes = tmp_path / "python"
    notes.write_text(
        f'#!/bin/sh\necho "$PYTHONPATH $*" >>{tmp_path}/log\n[ "$5" = wheel ] || cat "${{13}}" >>{tmp_path}/pins\n'
    )
    notes.chmod(0o755)
    command[3] = str(notes)
    subprocess.run(command, check=True)
    install, wheel = (tmp_path / "log").read_text().splitlines()
    assert "--require-hashes --no-deps --only-binary :all:" in install and "--no-build-isolation" in wheel
    assert wheel.split()[0] == install.split()[-3], "the setuptools that was installed by its hash"
    pins = (tmp_path / "pins").read_text().split()
    assert pins[0].startswith("setuptools==") and all("--hash=sha256:" in word for word in pins[2::2])


@pytest.fixture
def machine(tmp_path):
    """The words that run the script on a machine with pip and without uv, and its environment."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "mkdir", "flock", "grep", "rm", "date", "mv", "cat"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    write_command(tmp_path / "bin" / "python3")
    text = setup_vm.script(setup_vm.Version(name="1", changed=False), "x-1-py3-none-any.whl", "")
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin"), "PIP_NO_INDEX": "1"}
    return ["sh", "-c", text], {**environment, "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}


def test_an_installer_that_is_not_the_known_one_is_not_run(machine, tmp_path):
    words, environment = machine
    name = f"uv-{setup_vm.UV_VERSION}"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.data/scripts/uv", f"#!/bin/sh\n: > '{tmp_path}/pwned'\n")
        for file, content in (("METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: " + name[3:]), ("WHEEL", WHEEL)):
            wheel.writestr(f"{name}.dist-info/{file}", content + "\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr, done.stdout + done.stderr
    assert "setup: uv could not be installed; pip says why above" in done.stdout
    assert not (tmp_path / "pwned").exists() and not (tmp_path / ".lockstep/uv").exists()


WHEEL = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: py3-none-any"


def test_the_version_of_uv_is_the_one_that_is_tested():
    assert f"uv=={setup_vm.UV_VERSION}\n" in (setup_vm.ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "astral.sh" not in setup_vm.SCRIPT and "curl" not in setup_vm.SCRIPT


def test_the_script_is_one_that_shellcheck_accepts():
    version = setup_vm.Version(name="1.2.3-abc; rm -rf /", changed=True)
    text = setup_vm.script(version, "jax_lockstep-1.2.3-py3-none-any.whl", "tpu,gcs")
    assert "@" not in text.replace('"$@"', "") and "'1.2.3-abc; rm -rf /'" in text
    assert "requirement='./jax_lockstep-1.2.3-py3-none-any.whl[tpu,gcs]'" in text
    assert shellcheck(text, "--shell=sh", "--severity=style") == ""


@needs_git
def test_the_checkout_of_this_test_has_a_version():
    version = setup_vm.version_of()
    assert version.name.startswith(setup_vm._number(setup_vm.ROOT))
    files = setup_vm._files(setup_vm.ROOT)
    assert {"src/lockstep/launch/setup_vm.py", "constraints.txt", setup_vm.PINS} <= {*files}
    assert all(file.startswith("src/") or "/" not in file for file in files)
