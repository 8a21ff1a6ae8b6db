"""The preparation of launches that every process makes: an error on one is known to all before any launches."""

import contextlib
from collections.abc import Iterator

from lockstep.hosts.hosts import Hosts


@contextlib.contextmanager
def ready_on_all(hosts: Hosts, name: str) -> Iterator[None]:
    """Run a block on every process before launches of all; when it fails on one, it fails on all, and none launches.

    It is made for a loop of launches: the name may be used again, and it costs one barrier, nothing in a job of one
    process. `Hosts.run_on_all` also has processes share and agree.

    Args:
        hosts: The processes, inside a scope.
        name: The name of the place, the same on every process.

    Raises:
        PeerError: The block failed on at least one process; the same text on every process, its own error is the cause.
        HostTimeoutError: Not all came in time; names the missing ones and their last phase.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    hosts.reasons_to_stop(name, error)
