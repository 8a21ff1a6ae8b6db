"""The pytest plugin, in a project of a stranger: what docs/testing.md shows, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snippets import lacking

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"

SHOWN = {
    "test_logs_on_the_leader": "docs/testing.md:text:0",
    "test_keeps_the_model": "docs/testing.md:text:1",
    "test_loss": "docs/testing.md:text:2",
}
"""What the page shows of tests that fail."""

WAITS = """
import time

import pytest


@pytest.mark.processes(2, devices=1)
def test_loss(hosts):
    if hosts.index == 1:
        raise ValueError("no rows")
    time.sleep(60)
"""

REFUSED = """
import hypothesis
import pytest
from hypothesis import strategies

pytestmark = pytest.mark.processes(2, devices=1)


@pytest.fixture
def model():
    return lambda x: x


@hypothesis.given(strategies.integers())
def test_draws(number):
    pass


async def test_waits():
    pass


def test_takes_a_model(model):
    pass


def test_takes_monkeypatch(monkeypatch):
    pass


@pytest.mark.processes(3, gpus=2)
def test_has_gpus():
    pass
"""

ALONE = """
import sys


def test_alone(hosts):
    pass


def test_nothing_heavy_is_imported():
    assert not {"jax", "numpy", "lockstep.hosts"} & set(sys.modules)
"""

TOLD = [
    ("test_draws", "A test of hypothesis would draw other examples in each process."),
    ("test_waits", "A coroutine cannot be marked"),
    ("test_takes_a_model", "The fixture 'model' gives a function, which other processes cannot use: it cannot be"),
    ("test_takes_monkeypatch", "The fixture 'monkeypatch' gives a MonkeyPatch, which other processes cannot use: it"),
    ("test_has_gpus", "unexpected keyword argument 'gpus'. The marker is processes(count=2, devices=2, "),
    ("test_alone", "test_alone uses the fixture hosts, but runs in this process alone. Mark it with"),
]


def run_pytest(directory, *options):
    """Run it without the plugins that happen to be installed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "-rA", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def outcomes(text):
    """What became of each test, by its name."""
    return {name: how for how, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", text, re.MULTILINE)}


def example_files():
    """The files that the page shows, by their names."""
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE))


def test_what_cannot_run_in_processes_is_refused_and_nothing_heavy_is_imported(tmp_path):
    (tmp_path / "conftest.py").write_text(example_files()["conftest.py"])
    (tmp_path / "test_alone.py").write_text(ALONE)
    (tmp_path / "test_refused.py").write_text(REFUSED)
    text = run_pytest(tmp_path)
    found = outcomes(text)
    assert found.pop("test_nothing_heavy_is_imported") == "PASSED", text
    assert found.keys() == dict(TOLD).keys() and "PASSED" not in found.values(), text
    assert [words for _, words in TOLD if words not in text] == [], text


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "left_out",
    # Each test that fails ends a group of processes.
    [pytest.param("test_keeps_the_model", marks=pytest.mark.slow), pytest.param("", marks=pytest.mark.nightly)],
)
def test_the_example_of_the_page_passes_and_fails_as_it_says(left_out, tmp_path):
    files = example_files()
    assert sorted(files) == ["conftest.py", "test_step.py", "test_wrong.py"]
    for name, text in (files | {"test_waits.py": WAITS}).items():
        (tmp_path / name).write_text(text)
    text = run_pytest(tmp_path, *(["--deselect", f"test_wrong.py::{left_out}"] if left_out else []))
    wanted = {
        "test_steps": "PASSED",
        "test_rows_of_each_process": "PASSED",
        "test_logs_on_the_leader": "FAILED",
        "test_keeps_the_model": "FAILED",
        "test_loss": "FAILED",
    }
    wanted.pop(left_out, None)
    assert outcomes(text) == wanted, text
    assert {name: lacking(SHOWN[name], text) for name in wanted.keys() & SHOWN.keys()} == dict.fromkeys(
        wanted.keys() & SHOWN.keys()
    ), text
