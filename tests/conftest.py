"""The environment of the tests; examples; which tests run side by side; the time by file."""

# ruff: noqa: E402
from tests import isolation

isolation.isolate()  # before anything that reads the environment is imported

import collections
import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from lockstep import exits
from tests import selection

# The same examples in every run, however fast the machine is; tests/fuzz draws others when it is given time.
settings.register_profile("lockstep", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that start processes, one after the other; files of others go to who is free.

    The tests of a file share fixtures and compiled programs, which two workers would both make.
    """
    from tests.scheduling import ByFile

    return ByFile(config, log)


_reported_cpu_seconds = 0.0


def _used_cpu_seconds() -> float:
    """What this worker and the processes that it saw end have used."""
    return sum(os.times()[:4])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file unread of which no test can be asked for by its marks."""
    named = {Path(argument.partition("::")[0]).name for argument in config.args}
    is_wanted = not collection_path.match("test_*.py") or collection_path.name in named
    return None if is_wanted or selection.is_read(collection_path, config.option.markexpr) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test with a mark that its file does not name, which `pytest_ignore_collect` would leave out."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {"slow", "nightly", "optimized"}
        if not marks <= selection.marks_named_in(item.path):
            raise pytest.UsageError(f"{item.nodeid} has the marks {sorted(marks)}, and its file does not name them all")


gc.disable()  # until all tests are imported, which leaves no garbage


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let Python look for garbage among what tests make, not among libraries and tests: a sixth of the time."""
    global _reported_cpu_seconds
    _reported_cpu_seconds = _used_cpu_seconds()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # JAX traces a program into some hundred thousand objects
    gc.enable()


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Undo what a command of a test does to the package's log, which `caplog` could not see afterwards."""
    package = logging.getLogger("lockstep")
    handlers, level, propagate = list(package.handlers), package.level, package.propagate
    yield
    package.handlers, package.propagate = handlers, propagate
    package.setLevel(level)


@pytest.fixture(autouse=True)
def _no_abandoned_threads() -> Iterator[None]:
    """Forget the threads that a test gave up: `run_main` of a later one would end this process at once."""
    yield
    exits._given_up.clear()


SHOWN_FILES = 25


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note beside the duration of a test's part its processor time, which other tests hardly change."""
    global _reported_cpu_seconds
    report = yield
    used = _used_cpu_seconds()
    report.user_properties.append(("cpu_seconds", used - _reported_cpu_seconds))
    _reported_cpu_seconds = used
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how long the tests of each file took, set-up and clean-up included, whichever worker ran them."""
    seconds: collections.Counter[str] = collections.Counter()
    cpu: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                cpu[file] += dict(report.user_properties)["cpu_seconds"]
    if len(seconds) < 2:
        return
    terminalreporter.section(
        f"time by file, the {SHOWN_FILES} slowest of {len(seconds)}: seconds, then processor seconds"
    )
    for file, total in seconds.most_common(SHOWN_FILES):
        terminalreporter.write_line(f"{total:8.1f} {cpu[file]:8.1f}  {file}")
    terminalreporter.write_line(f"{seconds.total():8.1f} {cpu.total():8.1f}  in all, on all workers together")
