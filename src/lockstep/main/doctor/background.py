"""A check that may take long or hang: done in a thread, waited for until a deadline."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from lockstep.main.doctor.finding import Finding, attempt


class BackgroundCheck:
    """A check in a thread of its own, which does not keep the process alive.

    Args:
        name: The name of what is looked at.
        check: The check; it launches nothing.
        fix: What to do where it does not end in time.
    """

    def __init__(self, name: str, check: Callable[[], Finding | Iterable[Finding]], fix: str) -> None:
        self.name, self._fix = name, fix
        self._begun = time.monotonic()
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, args=(check,), name="lockstep-doctor", daemon=True)
        self._thread.start()

    def _run(self, check: Callable[[], Finding | Iterable[Finding]]) -> None:
        self._found = attempt(self.name, check)

    def findings(self, timeout_s: float) -> list[Finding]:
        """What it found, or that it did not answer.

        Args:
            timeout_s: The seconds since it began that it may take.
        """
        self._thread.join(max(0.0, self._begun + timeout_s - time.monotonic()))
        if self._found is None:
            return [Finding.to_fix(self.name, f"no answer within {timeout_s:g} s.", self._fix)]
        return self._found


def wait_for_all(checks: Sequence[BackgroundCheck], timeout_s: float) -> list[Finding]:
    """The findings of several checks, which run at the same time.

    Args:
        checks: The checks.
        timeout_s: The seconds since its beginning that each may take.
    """
    return [finding for check in checks for finding in check.findings(timeout_s)]
