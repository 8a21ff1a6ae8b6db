"""Which tests run side by side, where a worker dies."""

import os
import subprocess
import sys

MANY = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_many(number):
    pass
"""

DIES_ONCE = """
import os, pathlib, time

def test_that_dies_once():
    time.sleep(0.3)  # by then the other worker waits for the last files
    mark = pathlib.Path(__file__).with_suffix(".mark")
    if not mark.exists():
        mark.touch()
        os._exit(0)
"""

CONFTEST = """
from tests.scheduling import ByFile

def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
"""


def test_a_worker_that_dies_is_replaced_and_all_tests_run(tmp_path):
    for number in range(10):
        (tmp_path / f"test_a{number}.py").write_text(MANY)
    (tmp_path / "test_b.py").write_text(DIES_ONCE)
    for number in range(6):
        (tmp_path / f"test_c{number}.py").write_text("import time\ndef test_one(): time.sleep(0.1)\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "no:cacheprovider", "-q", "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "1 failed, 37 passed" in done.stdout, done.stdout + done.stderr
