"""Host-only work whose failure on one process is a failure on all."""

import contextlib
from collections.abc import Iterator

from lockstep.hosts.session import Hosts


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
