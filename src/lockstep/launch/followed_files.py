"""The logs of a job's attempts as they grow, where the launcher sees the files that the workers write."""

import re
from pathlib import Path

from lockstep.launch.console import Console


class FollowedFiles:
    """Shows what is new in ``attempt-N/worker-M.log`` below a directory, each line after ``[M] ``.

    Args:
        directory: The job's directory.
        console: Where lines are shown.
    """

    def __init__(self, directory: Path, console: Console) -> None:
        self._directory = directory
        self._console = console
        self._read: dict[Path, int] = {}

    def read(self, *, last: bool) -> None:
        """Show the whole lines that have been written since the last call.

        Args:
            last: Whether no more will be written: then a line without an end is shown too.
        """
        for path in sorted(self._directory.glob("attempt-*/worker-*.log"), key=_numbers):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = len(data) if last else data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in data[:whole].splitlines():
                self._console.line(f"[{_numbers(path)[1]}] ", line)


def _numbers(path: Path) -> tuple[int, int]:
    """The numbers of the attempt and of the worker."""
    attempt, worker = re.findall(r"\d+", f"{path.parent.name} {path.name}")
    return int(attempt), int(worker)
