"""Which tests run side by side."""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

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
