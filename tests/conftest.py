"""Four CPU devices in the process that runs the tests; which of them run side by side with `-n`."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ONE_AFTER_THE_OTHER = (HERE / "faults", HERE / "multiprocess")
"""Tests that start several processes, which fill two cores and keep time."""
# Set before the first use of a device. Most of a test's time goes to compiling programs that then run for milliseconds.
FLAGS = {"--xla_force_host_platform_device_count": 4, "--xla_backend_optimization_level": 0}

given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"{name}={value}" for name, value in FLAGS.items() if name not in given)])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, one worker runs all tests that start processes, one after the other; the rest go to who is free."""
    for item in items:
        if any(item.path.is_relative_to(directory) for directory in ONE_AFTER_THE_OTHER):
            item.add_marker(pytest.mark.xdist_group("processes"))
