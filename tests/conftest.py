"""Four CPU devices in the process that runs the tests; which of them run side by side with `-n`."""

import os
from typing import Any

import pytest

ONE_AFTER_THE_OTHER = ("tests/faults/", "tests/multiprocess/")
"""Tests that start several processes, which fill two cores and keep time."""

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before the first use of a device
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that start processes, one after the other; each other test goes to who is free."""
    # `--dist loadgroup` of pytest-xdist 3.8 has no effect with pytest 9.2, which gives tests another kind of name.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(ONE_AFTER_THE_OTHER) else nodeid

    return Scheduling(config, log)
