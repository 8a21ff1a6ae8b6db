"""The event loop of a run's asynchronous rewards."""

import asyncio
import threading
from collections.abc import Awaitable, Collection
from concurrent.futures import Future
from typing import Any

from lockstep.hosts import leader_only
from lockstep.printable import get_logger

log = get_logger(__name__)

FREE_S = 5.0
"""Seconds in which a loop takes a turn, unless a coroutine blocks it."""


class EventLoop:
    """One event loop, in a thread where a launch raises, for all threads and rollouts: a client of HTTP that a reward
    keeps belongs to the loop of its first request, and fails or hangs in another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, value: Awaitable[Any]) -> Future[tuple[Any, BaseException | None]]:
        """Have a value awaited, from any other thread; return it, or the error, once it is there."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                work = threading.Thread(
                    target=_turn, args=(self._loop,), name="lockstep-reward-event-loop", daemon=True
                )
                work.start()
            return asyncio.run_coroutine_threadsafe(_awaited(value), self._loop)

    def cancel(self, futures: Collection[Future[Any]]) -> None:
        """Cancel what was submitted. A loop that a coroutine blocks is left behind; the next value gets another one."""
        for future in futures:
            future.cancel()
        loop, free = self._loop, threading.Event()
        if not futures or loop is None:
            return
        loop.call_soon_threadsafe(free.set)
        if not free.wait(FREE_S):
            log.warning(
                "an async reward has blocked the event loop of all async rewards for %g s, so others are late too. "
                "Await what it waits for, or write def instead of async def",
                FREE_S,
            )
            with self._lock:
                if self._loop is loop:
                    self._loop = None


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    with leader_only():
        loop.run_forever()


async def _awaited(value: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await value, None
    except BaseException as error:  # KeyboardInterrupt and SystemExit would end the loop
        return None, error
