"""Work that a process still has as it ends, in whichever of its ways: finished if it takes moments, else named."""

import contextlib
import time
from collections.abc import Callable, Iterable

type Finish = Callable[[float], Iterable[str]]
"""Waits for some work, at most so many seconds, and returns what is not done by then, each as a sentence."""

WAIT_S = 2.0
"""Seconds that a process which ends of its own accord waits, over all work."""

_registered: list[Finish] = []


def before_end(finish: Finish) -> Finish:
    """Register work that the end of the process would lose.

    Args:
        finish: What waits for it. It starts nothing, and is called by any thread.

    Returns:
        The same.
    """
    _registered.append(finish)
    return finish


def finish_work(timeout_s: float) -> list[str]:
    """Wait for all work that is registered.

    Args:
        timeout_s: The seconds to wait at most.

    Returns:
        What is not done by then, each as a sentence. Nothing is raised.
    """
    deadline, left = time.monotonic() + timeout_s, list[str]()
    for finish in list(_registered):
        with contextlib.suppress(Exception):  # the process ends, and has its reason
            left += finish(max(0.0, deadline - time.monotonic()))
    return left
