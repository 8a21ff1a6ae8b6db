"""Adapters of other libraries' environments, tried where Levanter is not, beside which verifiers does not live.

The environment is made of packages of the registry, by their hashes; the second time it is there.
"""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ["tests/multiprocess/test_adapters.py", *(f"tests/unit/training/rl/test_{name}.py" for name in (
    "openenv_environment", "verifiers_environment", "verifiers_episode",
))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("marks", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_environments_of_verifiers_and_openenv(marks):
    command = ["bash", "scripts/test_versions.sh", "environments", "-q", "-m", marks, *TESTS]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2100)
    installed = "test_versions: environments" in tried.stdout
    if not installed and "error sending request" in tried.stderr:  # no test has run, and none can without the packages
        pytest.skip(f"no registry of packages can be reached: {tried.stderr[-300:]}")
    assert tried.returncode == 0, tried.stdout[-5000:] + tried.stderr[-2000:]
    assert " passed" in tried.stdout and "skipped" not in tried.stdout
