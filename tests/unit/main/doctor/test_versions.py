"""Packages that do not fit together are named, with what to install."""

import pytest

from lockstep.main.doctor.versions import check_versions

INSTALLED = {"jax-lockstep": "0.1.0", "jax": "0.11.1", "jaxlib": "0.11.1", "numpy": "2.3", "libtpu": "0.0.46.3"}
REQUIRED = {
    "jax-lockstep": ["jax<0.12,>=0.11.1", "numpy>=2", "gcsfs>=2025.1; extra == 'gcs'", "pytest>=8; extra == 'dev'"],
    "jax": ["jaxlib<=0.11.1,>=0.11.1", "libtpu==0.0.46.*; extra == 'tpu'", "tomli; python_version < '3.0'"],
}


def check(**changed):
    installed = INSTALLED | changed
    return check_versions(installed.get, lambda name: REQUIRED.get(name, ()))


def test_what_fits_is_one_line():
    (found,) = check()
    assert found.outcome == "ok"
    assert found.text.startswith("jax-lockstep 0.1.0, jax 0.11.1, jaxlib 0.11.1, libtpu 0.0.46.3, Python 3.")
    assert found.text.endswith("; 4 requirements fit")


@pytest.mark.parametrize(
    ("changed", "text", "fix"),
    [
        ({"libtpu": "0.0.30"}, "libtpu 0.0.30 is installed; jax 0.11.1 needs libtpu==0.0.46.*.", "libtpu==0.0.46.*"),
        (
            {"jax": "0.10.2"},
            "jax 0.10.2 is installed; jax-lockstep 0.1.0 needs jax<0.12,>=0.11.1.",
            "jax<0.12,>=0.11.1",
        ),
        ({"jaxlib": None}, "jaxlib is missing; jax needs jaxlib<=0.11.1,>=0.11.1.", "jaxlib<=0.11.1"),
        ({"gcsfs": "2024.1"}, "gcsfs 2024.1 is installed; jax-lockstep 0.1.0 needs gcsfs>=2025.1.", "gcsfs>=2025.1"),
        (
            {"haliax": "1.4", "marin-haliax": "0.2.227"},
            "haliax 1.4 and marin-haliax 0.2.227 install the same modules, over each other.",
            "pip uninstall -y haliax marin-haliax, then pip install marin-haliax==0.2.227",
        ),
    ],
    ids=["libtpu", "jax", "missing", "extra", "twice"],
)
def test_what_does_not_fit_is_named(changed, text, fix):
    (found,) = check(**changed)
    assert (found.outcome, found.text) == ("fix", text)
    assert "pip" in found.fix and fix in found.fix


def test_a_source_tree_is_a_warning():
    (found,) = check(**{"jax-lockstep": None})
    assert found.outcome == "warning" and found.text.startswith("jax-lockstep is not installed as a package")


def test_what_is_installed_here_fits():
    assert [each.outcome for each in check_versions()] == ["ok"]
