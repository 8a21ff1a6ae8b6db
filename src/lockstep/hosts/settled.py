"""Host-only work whose failure on one process is a failure on all."""

import contextlib
from collections.abc import Callable, Iterator

from lockstep.hosts.hosts import Hosts


@contextlib.contextmanager
def settled(hosts: Hosts, name: str) -> Iterator[None]:
    """Do host-only work whose failure on one process is a failure on all.

    Args:
        hosts: of the job.
        name: of the work, the same on every process.

    Raises:
        PeerError: it failed somewhere; the same text on every process. A single process raises its own error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if error is not None and hosts.count == 1:
        raise error
    hosts.settle(name, error)


def settled_values[T](hosts: Hosts, name: str, work: Callable[[], T]) -> list[T]:
    """Do work whose failure on one process is a failure on all, and whose result all are to know.

    Args:
        hosts: of the job.
        name: of the work, the same on every process.
        work: returns what this process has to tell, as short JSON.

    Returns:
        What every process has told, by process number.

    Raises:
        PeerError: it failed somewhere; the same text on every process. A single process raises its own error.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as caught:
        if hosts.count == 1:
            raise
        error = caught
    return hosts.settle(name, error, value)
