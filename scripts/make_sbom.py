"""The software bill of materials of a wheel, CycloneDX 1.6: each file that a user's pip would install, by its hash.

    pip install --dry-run --ignore-installed --only-binary :all: --quiet --report - WHEEL | python scripts/make_sbom.py

It installs nothing and runs nothing of what it names; it needs `packaging`. Fields: https://cyclonedx.org/docs/1.6/json.
"""

import datetime
import json
import sys
import uuid
from collections.abc import Collection
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def bill_of(report: dict[str, Any], time: datetime.datetime) -> dict[str, Any]:
    """The bill of the one requirement of an installation report of pip, and of all that it needs."""
    installed: dict[str, Any] = {canonicalize_name(each["metadata"]["name"]): each for each in report["install"]}
    (root,) = (name for name, each in installed.items() if each["requested"])
    components = {name: _component(each) for name, each in installed.items()}
    refs = {name: component["bom-ref"] for name, component in components.items()}
    needs = _dependencies(installed, report["environment"], root)
    hashes = "".join(each["hashes"][0]["content"] for each in components.values())
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, hashes)}",
        "version": 1,
        "metadata": {
            "timestamp": time.astimezone(datetime.UTC).isoformat(timespec="seconds"),
            "tools": {"components": [{"type": "application", "name": "pip", "version": report["pip_version"]}]},
            "component": components.pop(root),
        },
        "components": sorted(components.values(), key=lambda each: each["bom-ref"]),
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[each] for each in needs.get(name, ()))}
            for name in sorted(refs)
        ],
    }


def _component(installed: dict[str, Any]) -> dict[str, Any]:
    metadata, source = installed["metadata"], installed["download_info"]
    purl = f"pkg:pypi/{canonicalize_name(metadata['name'])}@{metadata['version']}"
    component = {
        "type": "library",
        "bom-ref": purl,
        "name": metadata["name"],
        "version": metadata["version"],
        "description": metadata.get("summary", ""),
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": source["archive_info"]["hashes"]["sha256"]}],
        "licenses": _licenses(metadata),
    }
    if source["url"].startswith("https:"):
        component["externalReferences"] = [{"type": "distribution", "url": source["url"]}]
    return component


def _licenses(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """An SPDX expression, else the names that the package gives, of a whole text the first line."""
    if expression := metadata.get("license_expression"):
        return [{"expression": expression}]
    own = metadata.get("license", "").strip().partition("\n")[0]
    classified = [each.rpartition(" :: ")[2] for each in metadata.get("classifier", []) if each.startswith("License")]
    return [{"license": {"name": name}} for name in classified or [own] if name]


def _dependencies(installed: dict[str, Any], environment: dict[str, str], root: str) -> dict[str, set[str]]:
    """The names that each needs here, with the extras that others need of it."""
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, Collection[str]]] = [(root, ())]
    while waiting:
        name, extras = waiting.pop()
        if (state := (name, frozenset(extras))) in seen:
            continue
        seen.add(state)
        for text in installed[name]["metadata"].get("requires_dist", []):
            one = Requirement(text)
            applies = one.marker is None or any(
                one.marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras)
            )
            if applies:
                needs.setdefault(name, set()).add(canonicalize_name(one.name))
                waiting.append((canonicalize_name(one.name), one.extras))
    return needs


if __name__ == "__main__":
    bill = bill_of(json.load(sys.stdin), datetime.datetime.now(datetime.UTC))
    print(json.dumps(bill, indent=2))
