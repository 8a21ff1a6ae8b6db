"""The release: notes from the changelog, a workflow with the rights that it needs, and extras that fit together."""

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
PATHS = [path for place in ("*.*", ".github/**/*.*", "docs/install.md") for path in ROOT.glob(place) if path.is_file()]
TEXT = {path.name: path.read_text(encoding="utf-8") for path in PATHS}
PROJECT = tomllib.loads(TEXT["pyproject.toml"])["project"]
PINS = dict(line.lower().split("==") for line in TEXT["constraints.txt"].split())
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]: 0.3.0\n\n- Not yet.\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- A thing."
    "\n\n## [0.1.0] - 2026-11-01\n\n- The first.\n"
)


def test_the_notes_are_those_of_the_version_and_what_does_not_fit_is_refused():
    for text, version, tag, message in (
        (CHANGELOG, "0.2.0", "v0.2.1", r"tag is v0\.2\.1, but pyproject\.toml has version 0\.2\.0\. Tag v0\.2\.0"),
        (CHANGELOG, "0.3.0", "v0.3.0", r"no section \[0\.3\.0\], only Unreleased, 0\.2\.0, 0\.1\.0\. Rename \[Unrel"),
        (CHANGELOG.replace(" - 2026-12-01", ""), "0.2.0", "v0.2.0", "has no date"),
        (CHANGELOG.replace("- The first.", ""), "0.1.0", "v0.1.0", r"\[0\.1\.0\] .* is empty"),
    ):
        with pytest.raises(SystemExit, match=message):
            notes(text, version, tag)
    assert notes(CHANGELOG, "0.2.0", "v0.2.0") == "### Added\n\n- A thing."
    ours = PROJECT["version"]
    dated = TEXT["CHANGELOG.md"].replace(f"## [Unreleased]: {ours}", f"## [{ours}] - 2026-12-31")
    assert "`SampleCallback`" in notes(dated, ours, f"v{ours}")


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.name)
def test_a_workflow_has_the_form_of_the_schema_and_runs_what_nobody_can_change(path):
    """A tag of an action can be moved, and a version of a package replaced: commits and hashes cannot."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", path]
    subprocess.run(command, check=True)
    text = TEXT[path.name]
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use) for use in re.findall("uses: *(.*)", text))
    assert all("--require-hashes" in line and "--no-deps" in line for line in re.findall("pip install (.*)", text))
    assert "--no-isolation" in text or "-m build" not in text  # isolated, it fetches setuptools


def test_only_who_publishes_may_and_runs_nothing_of_the_checkout():
    whole = yaml.safe_load(TEXT["release.yml"])
    jobs, publish = whole["jobs"], whole["jobs"]["publish"]
    assert whole["permissions"] == {"contents": "read"} and whole[True] == {"push": {"tags": ["v*"]}}
    rights = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert rights == {"publish": {"id-token": "write"}, "page": {"contents": "write"}}
    assert publish["environment"] == "pypi" and "secrets." not in TEXT["release.yml"]
    assert not [step for step in publish["steps"] if "run" in step or "checkout" in step["uses"]]
    for text in (step["run"] for job in jobs.values() for step in job["steps"] if "run" in step):
        # What GitHub runs them with: a failing command ends them, but of a pipe only the last one counts.
        assert not shellcheck(text, "--shell", "bash") and "|" not in text
    script = ROOT / "scripts" / "try_wheel.sh"
    assert not shellcheck(script.read_text(encoding="utf-8")) and script.stat().st_mode & 0o111


def test_every_pin_has_the_hashes_of_its_files_and_no_address():
    for name in ("hashes.txt", "release-tools.txt"):
        text = re.sub("^#.*\n", "", TEXT[name], flags=re.MULTILINE).strip().replace("\\\n", " ")
        pins = [" ".join(line.split()) for line in text.splitlines()]
        assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.+]+( --hash=sha256:[0-9a-f]{64})+", pin) for pin in pins)
        if name == "hashes.txt":
            assert {pin.split()[0] for pin in pins} == {f"{name}=={version}" for name, version in PINS.items()}


def test_pip_installs_known_files_alone():
    """What pip reports is compared with hashes.txt, for pip takes no hashes beside an editable checkout."""
    digest = re.search(r"^einops==(\S+).*\n.*sha256:(\w+)", TEXT["hashes.txt"], re.MULTILINE)
    checkout = {"metadata": {"name": "jax-lockstep", "version": "0"}, "download_info": {"dir_info": {}}}
    wrong = (("einops", digest[1], "0" * 64), ("einops", "0.0.1", digest[2]), ("numpy", PINS["numpy"], digest[2]))
    for name, version, found in (("Einops", digest[1], digest[2]), *wrong):
        archive = {"archive_info": {"hashes": {"sha256": found}}}
        report = {"install": [checkout, {"metadata": {"name": name, "version": version}, "download_info": archive}]}
        command = [sys.executable, ROOT / "scripts" / "check_hashes.py"]
        done = subprocess.run(command, input=json.dumps(report), capture_output=True, text=True)
        assert done.returncode == (name != "Einops")
        assert (f"{name}=={version}: the file of this index has SHA-256 {found}" in done.stderr) == done.returncode


BESIDE = "marin-levanter[tpu]"
"""Installed beside ours on a TPU where Levanter trains."""


def needs(name, extra):
    """The requirements of a package with an extra ("" for none), where it is installed in its pinned version."""
    if name == PROJECT["name"]:
        return PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for found in importlib.metadata.distributions(name=name):
        # Skipped, for the requirements of another version say nothing about the pins.
        if found.version != PINS.get(name):
            pytest.skip(f"{name} {found.version} is installed, which constraints.txt does not pin: make setup-tests")
        texts = map(Requirement, found.requires or [])
        return [str(one) for one in texts if one.marker is None or one.marker.evaluate({"extra": extra})]
    return []


def conflicts(texts, pins=PINS):
    """The requirements that these texts and what they need in turn have, and that the pins do not satisfy."""
    todo, seen = [*texts], set()
    while todo:
        one = Requirement(todo.pop())
        name = canonicalize_name(one.name)
        if name in pins and not one.specifier.contains(pins[name], prereleases=True):
            yield f"{one} against {name}=={pins[name]}"
        new = {(name, extra) for extra in ("", *one.extras)} - seen
        seen |= new
        todo += [text for each in new for text in needs(*each)]


@pytest.mark.parametrize("extra", [*PROJECT["optional-dependencies"], BESIDE])
def test_every_extra_resolves_to_the_pins(extra):
    """And is on the page about installing. Each fits one set of pins, so every combination of them does too."""
    ours = [PROJECT["name"], BESIDE] if extra == BESIDE else [f"{PROJECT['name']}[{extra}]"]
    assert not list(conflicts(ours)) and (extra == BESIDE or f"`{extra}`" in TEXT["install.md"])
    if extra in ("tpu", "plan", BESIDE):  # each brings libtpu, in the pinned version and no other
        assert "against libtpu==0.0.48.1" in "".join(conflicts(ours, PINS | {"libtpu": "0.0.48.1"}))
