"""Four CPU devices in the process that runs the tests; which of them run side by side with `-n`."""

import os
from typing import Any

import pytest

ONE_AFTER_THE_OTHER = ("tests/faults/", "tests/multiprocess/")
"""Tests that start several processes, which fill two cores and keep time."""
# Set before the first use of a device. Most of a test's time goes to compiling programs that then run for milliseconds.
FLAGS = {"--xla_force_host_platform_device_count": 4, "--xla_backend_optimization_level": 0}

given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"{name}={value}" for name, value in FLAGS.items() if name not in given)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that start processes, one after the other; each other test goes to who is free."""
    # `--dist loadgroup` of pytest-xdist 3.8 has no effect with pytest 9.2, which gives tests another kind of name.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(ONE_AFTER_THE_OTHER) else nodeid

    return Scheduling(config, log)
