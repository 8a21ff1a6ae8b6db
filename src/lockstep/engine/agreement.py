"""Work that every host does alike: when it fails on one, it fails on all."""

from collections.abc import Callable
from typing import cast

from lockstep.hosts import Hosts


def settled[T](scope: Hosts, name: str, work: Callable[[], T]) -> T:
    """Does ``work`` on every host; when it fails on any, all raise the same error.

    Args:
        scope: of hosts, where ``name`` was not used before.
        name: of the phase.
        work: host-only, or launches what every host launches.

    Raises:
        PeerError: it failed on at least one host.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as failure:
        error = failure
    scope.settle(name, error)
    return cast(T, result)
