"""The release: notes from the changelog, a workflow with the rights that it needs, and extras that fit together."""

import functools
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.release_notes import notes
from tests.fake_cloud.shellcheck import shellcheck

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGELOG = """# Changelog

## [Unreleased]: 0.3.0

- Not yet.

## [0.2.0] - 2026-12-01

### Added

- A thing, see [Engine].

## [0.1.0] - 2026-11-01

- The first.
"""


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(RELEASE.read_text(encoding="utf-8"))["jobs"]


def steps(job, key):
    return [step[key] for step in job["steps"] if key in step]


def test_the_notes_are_those_of_the_version():
    assert notes(CHANGELOG, "0.2.0", "v0.2.0") == "### Added\n\n- A thing, see [Engine]."
    assert notes(CHANGELOG, "0.1.0", "v0.1.0") == "- The first."


@pytest.mark.parametrize(
    ("version", "tag", "message"),
    [
        ("0.2.0", "v0.2.1", r"the tag is v0\.2\.1, but pyproject\.toml has version 0\.2\.0\. Tag v0\.2\.0"),
        ("0.3.0", "v0.3.0", r"no section \[0\.3\.0\], only Unreleased, 0\.2\.0, 0\.1\.0\. Rename \[Unreleased\]"),
    ],
)
def test_what_does_not_go_together_is_refused(version, tag, message):
    with pytest.raises(SystemExit, match=message):
        notes(CHANGELOG, version, tag)


@pytest.mark.parametrize(
    ("changed", "message"),
    [(("0.2.0] - 2026-12-01", "0.2.0]"), "has no date"), (("- The first.\n", "\n"), r"\[0\.1\.0\] .* is empty")],
)
def test_a_section_without_a_date_or_without_text_is_refused(changed, message):
    version = "0.2.0" if "0.2.0" in changed[0] else "0.1.0"
    with pytest.raises(SystemExit, match=message):
        notes(CHANGELOG.replace(*changed), version, f"v{version}")


def test_the_changelog_of_this_checkout_can_be_released():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = PROJECT["version"]
    dated = text.replace(f"## [Unreleased]: {version}", f"## [{version}] - 2026-12-31")
    assert "`SampleCallback`" in notes(dated, version, f"v{version}")
    script = subprocess.run(
        [sys.executable, "scripts/release_notes.py", "v9.9.9"], cwd=ROOT, capture_output=True, text=True
    )
    assert script.returncode == 1 and "the tag is v9.9.9" in script.stderr and not script.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_one_that_the_schema_allows(path):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_cannot_be_changed_elsewhere(path):
    """A tag of an action can be moved, and a version of a package replaced: commits and hashes cannot."""
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"uses: *(.*)", text):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    for line in re.findall(r"pip install (.*)", text):
        assert "--require-hashes" in line and "--no-deps" in line, line
    assert "--no-isolation" in text or "-m build" not in text  # isolated, it fetches setuptools
    tools = (ROOT / ".github" / "release-tools.txt").read_text(encoding="utf-8")
    named = [line for line in tools.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in named)
    assert {"build", "setuptools", "twine"} <= {line.partition("==")[0] for line in named}


def test_only_who_publishes_may(jobs):
    whole = yaml.safe_load(RELEASE.read_text(encoding="utf-8"))
    assert whole["permissions"] == {"contents": "read"} and whole[True] == {"push": {"tags": ["v*"]}}
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"},
        "page": {"contents": "write"},
    }
    assert jobs["publish"]["environment"] == "pypi"
    assert "secrets." not in RELEASE.read_text(encoding="utf-8")
    # Who may publish runs nothing of the checkout.
    assert not steps(jobs["publish"], "run") and not any("checkout" in use for use in steps(jobs["publish"], "uses"))


def test_commands_of_the_workflow_and_the_script_are_shell(jobs):
    for text in (text for job in jobs.values() for text in steps(job, "run")):
        # What GitHub runs them with: a failing command ends them, but of a pipe only the last one counts.
        assert not shellcheck(text, "--shell", "bash") and "|" not in text
        for script in re.findall(r"scripts/[\w.]+", text):
            assert (ROOT / script).is_file()
    script = ROOT / "scripts" / "try_wheel.sh"
    assert not shellcheck(script.read_text(encoding="utf-8")) and script.stat().st_mode & 0o111


def test_every_extra_is_on_the_page_about_installing():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(PROJECT["optional-dependencies"]) <= set(re.findall(r"`(\w+)`", page))


# The pins of constraints.txt fit together for every combination of extras, as the installed packages say; nothing is
# downloaded.

PINS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().split())
}


def test_every_pin_has_the_hashes_of_its_files():
    """And nothing else is in the file: no index, no address."""
    known = (ROOT / "hashes.txt").read_text(encoding="utf-8")
    pins = [pin.replace("\\\n", " ").split() for pin in re.split(r"\n(?! )", known.strip())]
    assert {first for first, *_ in pins} == {f"{name}=={version}" for name, version in PINS.items()}
    for first, *hashes in pins:
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), first


def test_pip_installs_known_files_alone(tmp_path):
    """What pip reports is compared with hashes.txt, for pip takes no hashes beside an editable checkout."""
    digest = re.search(r"^einops==(\S+).*\n.*sha256:(\w+)", (ROOT / "hashes.txt").read_text(), re.MULTILINE)

    def check(name: str, version: str, found: str) -> subprocess.CompletedProcess[str]:
        archive = {"archive_info": {"hashes": {"sha256": found}}}
        checkout = {"metadata": {"name": "jax-lockstep", "version": "0"}, "download_info": {"dir_info": {}}}
        report = {"install": [checkout, {"metadata": {"name": name, "version": version}, "download_info": archive}]}
        command = [sys.executable, ROOT / "scripts" / "check_hashes.py"]
        return subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, cwd=tmp_path)

    assert check("Einops", digest[1], digest[2]).returncode == 0
    for name, version, found in (
        ("einops", digest[1], "0" * 64),
        ("einops", "0.0.1", digest[2]),
        ("numpy", PINS["numpy"], digest[2]),
    ):
        done = check(name, version, found)
        assert done.returncode == 1 and f"{name}=={version}: the file of this index has SHA-256 {found}" in done.stderr


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
    # Skipped, for the requirements of another version say nothing about the pins; `make test` installs the pinned one.
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
