"""Which tests run side by side."""

import contextlib
import importlib
import os
import sys
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.isolation import ROOT

ONE_AFTER_THE_OTHER = ("tests/faults/", "tests/multiprocess/")
"""Tests that start several processes, which fill two cores and keep time."""

ON_ONE_WORKER = ("tests/browser/", "tests/package/")
"""Tests that share something that takes long to make: a browser, a wheel."""


class ByFile(LoadScopeScheduling):
    """Files, each to the worker that is free.

    `--dist loadgroup` of pytest-xdist 3.8 has no effect with pytest 9.2, which gives tests another kind of name.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ONE_AFTER_THE_OTHER):
            return "processes"
        file = nodeid.partition("::")[0]
        return next((shared for shared in ON_ONE_WORKER if file.startswith(shared)), file)

    def _reschedule(self, node: Any) -> None:
        # A worker runs its last test only when it knows that none or which follows. What xdist hands out again after
        # a worker died has files whose tests are all done: with one of those alone the others would wait for ever.
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)


def import_apart(config: pytest.Config) -> None:
    """Import all modules of tests in a worker of pytest-xdist, each worker from another one on.

    What Python and pytest compile of a module is kept in a file. In one order, workers that find no files, as after a
    new installation, would all compile everything: a minute of two cores for three workers.
    """
    worker, tests = os.environ.get("PYTEST_XDIST_WORKER", ""), ROOT / "tests"
    if not worker or sys.dont_write_bytecode or [*map(os.path.abspath, config.args)] != [str(tests)]:
        return
    files = sorted(tests.rglob("test_*.py"))
    first = len(files) * int(worker.removeprefix("gw")) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection tells it
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
