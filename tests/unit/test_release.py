"""The release: notes from the changelog, who may publish, known files alone, and extras that fit together."""

import datetime
import functools
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import check_hashes, make_sbom, public_names
from scripts.release_notes import notes
from tests.extras import NEEDS_CLIENTS

ROOT = Path(__file__).parents[2]
PATHS = [path for place in ("*.*", ".github/**/*.*", "docs/install.md") for path in ROOT.glob(place) if path.is_file()]
TEXT = {path.name: path.read_text(encoding="utf-8") for path in PATHS}
PROJECT = tomllib.loads(TEXT["pyproject.toml"])["project"]
PINS = dict(line.lower().split("==") for line in TEXT["constraints.txt"].split())
CHANGELOG = "# Changelog\n\n## [Unreleased]: 0.3.0\n\n- Not yet.\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- A.\n"


def test_the_notes_are_those_of_the_version_and_what_does_not_fit_is_refused():
    for text, version, tag, message in (
        (CHANGELOG, "0.2.0", "v0.2.1", r"tag is v0\.2\.1, but pyproject\.toml has version 0\.2\.0\. Tag v0\.2\.0"),
        (CHANGELOG, "0.3.0", "v0.3.0", r"no section \[0\.3\.0\], only Unreleased, 0\.2\.0\. Rename \[Unreleased"),
        (CHANGELOG.replace(" - 2026-12-01", ""), "0.2.0", "v0.2.0", "has no date"),
        (CHANGELOG.partition("###")[0], "0.2.0", "v0.2.0", r"\[0\.2\.0\] .* is empty"),
    ):
        with pytest.raises(SystemExit, match=message):
            notes(text, version, tag)
    assert notes(CHANGELOG, "0.2.0", "v0.2.0") == "### Added\n\n- A."


def test_only_who_publishes_may_and_the_release_runs_nothing_that_somebody_can_change():
    """A tag of an action can be moved, and a version of a package replaced: commits and hashes cannot."""
    text = TEXT["release.yml"]
    whole = yaml.safe_load(text)
    publish = whole["jobs"]["publish"]
    assert whole["permissions"] == {"contents": "read"} and whole[True] == {"push": {"tags": ["v*"]}}
    rights = {name: job["permissions"] for name, job in whole["jobs"].items() if "permissions" in job}
    assert rights == {"publish": {"id-token": "write"}, "page": {"contents": "write"}}
    assert publish["environment"] == "pypi" and "secrets." not in text
    assert not [step for step in publish["steps"] if "run" in step or "checkout" in step["uses"]]
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use) for use in re.findall("uses: *(.*)", text))
    for line in re.findall("pip install (.*)", text):
        nothing_is_run = "--dry-run" in line and "--only-binary :all:" in line
        assert nothing_is_run or ("--require-hashes" in line and "--no-deps" in line)
    assert publish["steps"][-1]["with"] == {"attestations": True}, "the provenance of each file"
    assert re.findall("-m build(.*)", text) == [" --no-isolation"]  # isolated, it fetches setuptools


def test_the_site_is_published_from_main_by_who_may_and_by_known_actions():
    text = TEXT["site.yml"]
    whole = yaml.safe_load(text)
    rights = {name: job["permissions"] for name, job in whole["jobs"].items() if "permissions" in job}
    assert whole["permissions"] == {"contents": "read"} and whole[True]["push"] == {"branches": ["main"]}
    assert rights == {"publish": {"pages": "write", "id-token": "write"}} and "secrets." not in text
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use) for use in re.findall("uses: *(.*)", text))
    assert not [step for step in whole["jobs"]["publish"]["steps"] if "run" in step]
    built = yaml.safe_load((ROOT / "mkdocs.yml").read_text().partition("\nmarkdown_extensions")[0])["site_dir"]
    assert whole["jobs"]["build"]["steps"][-1]["with"]["path"] == built


def installed(name, digest, *requirements, url="https://files.example/a.whl", **more):
    """A package as pip's report has it."""
    metadata = {"name": name, "version": "1.0", "requires_dist": list(requirements)} | more
    source = {"url": url, "archive_info": {"hashes": {"sha256": digest * 64}}}
    return {"metadata": metadata, "download_info": source, "requested": url.startswith("file:")}


def test_the_bill_of_materials_has_each_file_by_its_hash_and_who_needs_it():
    """The bill of the wheel of 2026-11-28 has passed the strict schema of CycloneDX 1.6."""
    own = ["b[fast]>=1; python_version >= '3'", "gone; python_version < '3'", "tests; extra == 'dev'"]
    report = {
        "pip_version": "26.3",
        "environment": {"python_version": "3.12"},
        "install": [
            installed("Lock_Step", "a", *own, url="file:///dist/a.whl", license_expression="Apache-2.0"),
            installed("b", "b", "c.d; extra == 'fast'", classifier=["License :: OSI Approved :: MIT License"]),
            installed("c.d", "c", license="BSD\nall of its text"),
        ],
    }
    bill = make_sbom.bill_of(report, datetime.datetime(2026, 12, 1, 1, tzinfo=datetime.UTC))
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    wheel, components = bill["metadata"]["component"], bill["components"]
    assert bill["metadata"]["timestamp"] == "2026-12-01T01:00:00+00:00" and "externalReferences" not in wheel
    assert [each["purl"] for each in (wheel, *components)] == [
        "pkg:pypi/lock-step@1.0", "pkg:pypi/b@1.0", "pkg:pypi/c-d@1.0",
    ]  # fmt: skip
    assert [each["hashes"][0]["content"][0] for each in (wheel, *components)] == ["a", "b", "c"]
    assert [each["licenses"] for each in (wheel, *components)] == [
        [{"expression": "Apache-2.0"}], [{"license": {"name": "MIT License"}}], [{"license": {"name": "BSD"}}],
    ]  # fmt: skip
    assert {each["ref"]: each["dependsOn"] for each in bill["dependencies"]} == {
        "pkg:pypi/lock-step@1.0": ["pkg:pypi/b@1.0"],
        "pkg:pypi/b@1.0": ["pkg:pypi/c-d@1.0"],
        "pkg:pypi/c-d@1.0": [],
    }
    again = make_sbom.bill_of(report, datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC))
    assert again["serialNumber"] == bill["serialNumber"], "the same files"


def test_the_release_has_its_bill_of_materials():
    jobs = yaml.safe_load(TEXT["release.yml"])["jobs"]
    (made,) = (step["run"] for step in jobs["build"]["steps"] if step.get("name") == "Bill of materials")
    assert "--report - dist/*.whl | python scripts/make_sbom.py >" in made
    kept = [step["with"]["path"] for step in jobs["build"]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert kept == ["dist/", "notes.md\n*.cdx.json\n"], "PyPI gets the first alone"
    assert jobs["page"]["steps"][-1]["run"].endswith(" ./*.whl ./*.tar.gz ./*.cdx.json")


def test_the_pins_of_both_files_are_the_same_and_each_has_a_hash():
    pins = re.findall(r"^(\S+==\S+) \\\n +--hash=sha256:[0-9a-f]{64}", TEXT["hashes.txt"], re.MULTILINE)
    assert set(pins) == {f"{name}=={version}" for name, version in PINS.items()}


def test_pip_installs_known_files_alone():
    """What pip reports is compared with hashes.txt, for pip takes no hashes beside an editable checkout."""
    digest = re.search(r"^einops==(\S+).*\n.*sha256:(\w+)", TEXT["hashes.txt"], re.MULTILINE)
    checkout = {"metadata": {"name": "jax-lockstep", "version": "0"}, "download_info": {"dir_info": {}}}
    for name, version in (("Einops", digest[1]), ("einops", "0.0.1"), ("numpy", PINS["numpy"])):
        archive = {"archive_info": {"hashes": {"sha256": digest[2]}}}
        report = {"install": [checkout, {"metadata": {"name": name, "version": version}, "download_info": archive}]}
        told = "".join(check_hashes.unknown(report, TEXT["hashes.txt"]))
        wanted = "" if name == "Einops" else f"{name}=={version}: the file of this index has SHA-256 {digest[2]}, "
        assert told.startswith(wanted) and bool(told) == bool(wanted)


def test_what_builds_a_package_is_known_too():
    """An isolated build fetches whatever setuptools the index has and runs it; of what has a wheel nothing is built."""
    text = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    sdists = re.findall(r"--no-binary ([\w-]+)", text)
    assert set(sdists) <= set(PINS) and "setuptools" in PINS
    commands = re.findall(r"(?:\bpip install|\{pip\[@\]\}\")(?:[^\n]*\\\n)*[^\n]*", text)
    assert len(commands) >= 5
    for command in commands:
        if command.endswith("--disable-pip-version-check)"):
            continue  # the words of those below
        by_hash = "--require-hashes --no-deps" in command
        by_uv = "-c hashes.txt --build-constraint hashes.txt" in command and "--only-binary :all:" in command
        later = text.index(command) > text.index("pip+=(--no-build-isolation --only-binary :all:")
        assert by_hash or by_uv or later, command


@NEEDS_CLIENTS
def test_a_public_name_does_not_change_without_a_line_in_the_changelog():
    """Neither does the name of an argument or of a member. Mention it in backticks below `## [Unreleased]`."""
    released = set(public_names.FILE.read_text(encoding="utf-8").splitlines())
    section = TEXT["CHANGELOG.md"].partition("## [Unreleased]")[2].partition("\n## [")[0]
    assert not public_names.unmentioned(released, {*public_names.lines()}, section)
    before, after = {"lockstep.Engine(config)", "lockstep.view(x)"}, {"lockstep.Engine(settings)", "lockstep.new()"}
    assert public_names.unmentioned(before, after, "- `view` is gone.") == [
        "lockstep.Engine(config)", "lockstep.Engine(settings)", "lockstep.new()",
    ]  # fmt: skip
    assert not public_names.unmentioned(before, after, "- `view` is gone, `lockstep.new()` and `Engine` came")


@pytest.mark.parametrize("kind", [DeprecationWarning, PendingDeprecationWarning, FutureWarning])
def test_what_a_dependency_will_remove_is_an_error_where_the_call_is_ours(kind):
    call = compile("import warnings; warnings.warn('use another', kind)", "a file", "exec")
    with pytest.raises(kind, match="use another"):
        exec(call, {"__name__": "lockstep.somewhere", "kind": kind})
    with pytest.warns(kind):
        exec(call, {"__name__": "somebody.else", "kind": kind})


def test_the_other_line_of_jax_is_pinned_too_and_fits():
    """In hashes-jax-0.12.txt, as pyproject.toml allows it, each with a hash."""
    pattern = r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+) \\\n +--hash=sha256:[0-9a-f]{64}"
    pins = dict(re.findall(pattern, TEXT["hashes-jax-0.12.txt"], re.MULTILINE))
    assert pins["jax"].startswith("0.12.") and PINS["jax"].startswith("0.11.")
    for extra in ("dev", "plan", "gcs", "eval"):
        for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]):
            one = Requirement(text)
            assert one.name == PROJECT["name"] or one.specifier.contains(
                pins[canonicalize_name(one.name)], prereleases=True
            )


BESIDE = "marin-levanter[tpu]"  # on a TPU where Levanter trains


@functools.cache
def needs(name, extra):
    """The requirements of a package with an extra ("" for none), where it is installed as constraints.txt pins it."""
    if name == PROJECT["name"]:
        return PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found = [each.requires for each in importlib.metadata.distributions(name=name) if each.version == PINS.get(name)]
    ours = map(Requirement, (found and found[0]) or [])
    return [str(one) for one in ours if one.marker is None or one.marker.evaluate({"extra": extra})]


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


@pytest.mark.skipif(
    importlib.metadata.version("jax") != PINS["jax"], reason="the versions of constraints.txt are not installed"
)
@pytest.mark.parametrize("extra", [*PROJECT["optional-dependencies"], BESIDE])
def test_every_extra_resolves_to_the_pins(extra):
    """And is on the page about installing. Each fits one set of pins, so every combination of them does too."""
    ours = [PROJECT["name"], BESIDE] if extra == BESIDE else [f"{PROJECT['name']}[{extra}]"]
    assert not list(conflicts(ours)) and (extra == BESIDE or f"`{extra}`" in TEXT["install.md"])
    if extra in ("tpu", "plan", BESIDE):  # each brings libtpu, in the pinned version and no other
        assert "against libtpu==0.0.48.1" in "".join(conflicts(ours, PINS | {"libtpu": "0.0.48.1"}))
