"""The release: notes from the changelog, a workflow with the rights that it needs, and extras that fit together."""

import functools
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.release_notes import notes
from tests.fake_cloud.shellcheck import shellcheck

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HASHES = (ROOT / "hashes.txt").read_text(encoding="utf-8")
PINS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().split())
}
CHANGELOG = "# Changelog\n\n## [Unreleased]: 0.3.0\n\n- Not yet.\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- A thing."
CHANGELOG += "\n\n## [0.1.0] - 2026-11-01\n\n- The first.\n"


def test_the_notes_are_those_of_the_version():
    assert notes(CHANGELOG, "0.2.0", "v0.2.0") == "### Added\n\n- A thing."
    text, version = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), PROJECT["version"]
    dated = text.replace(f"## [Unreleased]: {version}", f"## [{version}] - 2026-12-31")
    assert "`SampleCallback`" in notes(dated, version, f"v{version}")


@pytest.mark.parametrize(
    ("version", "tag", "changed", "message"),
    [
        ("0.2.0", "v0.2.1", ("", ""), r"tag is v0\.2\.1, but pyproject\.toml has version 0\.2\.0\. Tag v0\.2\.0"),
        ("0.3.0", "v0.3.0", ("", ""), r"no section \[0\.3\.0\], only Unreleased, 0\.2\.0, 0\.1\.0\. Rename \[Unrel"),
        ("0.2.0", "v0.2.0", (" - 2026-12-01", ""), "has no date"),
        ("0.1.0", "v0.1.0", ("- The first.\n", "\n"), r"\[0\.1\.0\] .* is empty"),
    ],
)
def test_a_release_that_does_not_fit_its_changelog_is_refused(version, tag, changed, message):
    with pytest.raises(SystemExit, match=message):
        notes(CHANGELOG.replace(*changed), version, tag)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_the_form_of_the_schema_and_runs_what_nobody_can_change(path):
    """A tag of an action can be moved, and a version of a package replaced: commits and hashes cannot."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"uses: *(.*)", text):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    assert all("--require-hashes" in line and "--no-deps" in line for line in re.findall(r"pip install (.*)", text))
    assert "--no-isolation" in text or "-m build" not in text  # isolated, it fetches setuptools
    tools = (ROOT / ".github" / "release-tools.txt").read_text(encoding="utf-8")
    pins = [line for line in tools.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in pins)


def test_only_who_publishes_may_and_runs_nothing_of_the_checkout():
    whole = yaml.safe_load(RELEASE)
    jobs = whole["jobs"]
    assert whole["permissions"] == {"contents": "read"} and whole[True] == {"push": {"tags": ["v*"]}}
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"},
        "page": {"contents": "write"},
    }
    assert jobs["publish"]["environment"] == "pypi" and "secrets." not in RELEASE
    assert not [step for step in jobs["publish"]["steps"] if "run" in step or "checkout" in step["uses"]]
    for text in (step["run"] for job in jobs.values() for step in job["steps"] if "run" in step):
        # What GitHub runs them with: a failing command ends them, but of a pipe only the last one counts.
        assert not shellcheck(text, "--shell", "bash") and "|" not in text
    script = ROOT / "scripts" / "try_wheel.sh"
    assert not shellcheck(script.read_text(encoding="utf-8")) and script.stat().st_mode & 0o111


def test_every_pin_has_the_hashes_of_its_files_and_no_address():
    pins = [pin.replace("\\\n", " ").split() for pin in re.split(r"\n(?! )", HASHES.strip())]
    assert {first for first, *_ in pins} == {f"{name}=={version}" for name, version in PINS.items()}
    for first, *hashes in pins:
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), first


def test_pip_installs_known_files_alone(tmp_path):
    """What pip reports is compared with hashes.txt, for pip takes no hashes beside an editable checkout."""
    digest = re.search(r"^einops==(\S+).*\n.*sha256:(\w+)", HASHES, re.MULTILINE)
    checkout = {"metadata": {"name": "jax-lockstep", "version": "0"}, "download_info": {"dir_info": {}}}
    for name, version, found, code in (
        ("Einops", digest[1], digest[2], 0),
        ("einops", digest[1], "0" * 64, 1),
        ("einops", "0.0.1", digest[2], 1),
        ("numpy", PINS["numpy"], digest[2], 1),
    ):
        archive = {"archive_info": {"hashes": {"sha256": found}}}
        report = {"install": [checkout, {"metadata": {"name": name, "version": version}, "download_info": archive}]}
        command = [sys.executable, ROOT / "scripts" / "check_hashes.py"]
        done = subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code
        assert not code or f"{name}=={version}: the file of this index has SHA-256 {found}" in done.stderr


BESIDE = "marin-levanter[tpu]"
"""Installed beside ours on a TPU where Levanter trains."""


@functools.cache
def needs(name, extra):
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
    texts = map(Requirement, found.requires or [])
    return [str(one) for one in texts if one.marker is None or one.marker.evaluate({"extra": extra})]


def conflicts(texts, pins=PINS):
    """Each requirement that these texts and what they need in turn have, and whether the pins satisfy it."""
    todo, seen, found = [Requirement(text) for text in texts], set(), {}
    while todo:
        one = todo.pop()
        pin = pins.get(canonicalize_name(one.name))
        found[f"{one} against {one.name}=={pin}"] = pin is None or one.specifier.contains(pin, prereleases=True)
        new = {(canonicalize_name(one.name), extra) for extra in ("", *one.extras)} - seen
        seen |= new
        todo += [Requirement(text) for name, extra in new for text in needs(name, extra)]
    return found


@pytest.mark.parametrize("extra", [*PROJECT["optional-dependencies"], BESIDE])
def test_every_extra_resolves_to_the_pins(extra):
    """And is on the page about installing. Each fits one set of pins, so every combination of them does too."""
    ours = [PROJECT["name"], BESIDE] if extra == BESIDE else [f"{PROJECT['name']}[{extra}]"]
    assert all(conflicts(ours).values())
    assert extra == BESIDE or f"`{extra}`" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    if extra in ("tpu", "plan", BESIDE):  # each brings libtpu, in the pinned version and no other
        other = conflicts(ours, PINS | {"libtpu": "0.0.48.1"})
        assert any("against libtpu==0.0.48.1" in text for text, fits in other.items() if not fits)
