"""Host logic between threads of one process, in milliseconds."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


def run_threads(body: Callable[..., Any], count: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run ``body(hosts, *args)`` in threads of this process, each of them one "process" of a job without devices.

    They share the in-memory twin of the coordination service, so it is for what hosts say to each other.

    Args:
        body: Any callable; it gets a `lockstep.hosts.Hosts` and ``args``.
        count: How many threads.
        args: What the body gets.
        timeout_s: The seconds that a wait of the `Hosts` may last.

    Returns:
        What each one returned, by number.

    Raises:
        BaseException: The first error of a body.
    """
    from lockstep.hosts import Hosts, MemoryClient

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        hosts = [Hosts(client, timeout_s) for client in MemoryClient.hub(count)]
        futures = [pool.submit(body, one, *args) for one in hosts]
        return [future.result() for future in futures]
