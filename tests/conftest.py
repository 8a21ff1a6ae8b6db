"""Four CPU devices in the process that runs the tests; examples; which tests run side by side; the time by file."""

import collections
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, however fast the machine is; tests/fuzz draws others when it is given time.
settings.register_profile("lockstep", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")

ONE_AFTER_THE_OTHER = ("tests/faults/", "tests/multiprocess/")
"""Tests that start several processes, which fill two cores and keep time."""

ON_ONE_WORKER = (
    "tests/browser/",
    "tests/package/",
    "tests/unit/training/rl/test_rollouts.py",
    "tests/unit/training/step/test_train_state.py",
)
"""Tests that share something that takes long to make: a browser, a wheel, a training run."""

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before the first use of a device
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

# A shell starts what it leaves in the background with SIGINT ignored, nohup with SIGHUP, and so would be what the tests
# start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that start processes, one after the other; most others go to who is free."""
    # `--dist loadgroup` of pytest-xdist 3.8 has no effect with pytest 9.2, which gives tests another kind of name.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(ONE_AFTER_THE_OTHER):
                return "processes"
            return next((shared for shared in ON_ONE_WORKER if nodeid.startswith(shared)), nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _data_caches_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the caches of training data apart from the user's, also in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


SHOWN_FILES = 25


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how long the tests of each file took, set-up and clean-up included, whichever worker ran them."""
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) < 2:
        return
    terminalreporter.section(f"time by file, the {SHOWN_FILES} slowest of {len(seconds)}")
    for file, total in seconds.most_common(SHOWN_FILES):
        terminalreporter.write_line(f"{total:8.1f} s  {file}")
    terminalreporter.write_line(f"{seconds.total():8.1f} s  in all, on all workers together")
