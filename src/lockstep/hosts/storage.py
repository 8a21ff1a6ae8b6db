"""Waits for storage, a disk or a bucket, that may have stopped answering: lines in the log, tries, a deadline."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from lockstep.errors import HostTimeoutError
from lockstep.hosts.fault import is_passing
from lockstep.printable import get_logger

log = get_logger(__name__)

LINE_S, REPEAT_S = 10.0, 60.0
"""Seconds of a wait until the log has a line of it, and between two lines."""
TRY_S = 60.0  # seconds that one try of a read may take
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds between two tries: the first pause, and the longest of those that follow, each twice the one before."""


@contextlib.contextmanager
def storage_wait(doing: str) -> Iterator[None]:
    """Say in the log what storage is waited for and since when, where that takes long: after 10 s, then each minute.

    Args:
        doing: What is waited for, with its path or URL, such as "reading gs://bucket/data/metadata.json".
    """
    since, begin, ended = time.strftime("%H:%M:%S"), time.monotonic(), threading.Event()

    def tell() -> None:
        pause_s = LINE_S
        while not ended.wait(pause_s):
            log.warning("waiting for storage since %s (%.0f s): %s", since, time.monotonic() - begin, doing)
            pause_s = REPEAT_S

    threading.Thread(target=tell, name="lockstep-storage-wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def call_storage[Result](
    doing: str, work: Callable[[], Result], timeout_s: float, *, try_s: float | None = None
) -> Result:
    """Return what ``work`` returns; where storage does not answer, try again after a pause, until the time is over.

    The work is done in a thread, which is left behind where it hangs: no library has a limit for every call.

    Args:
        doing: What is waited for, with its path or URL.
        work: A function that may be called several times, by two threads at once where the first call hangs.
        timeout_s: The seconds of all tries.
        try_s: The seconds of one; None for `TRY_S`.

    Raises:
        HostTimeoutError: Storage did not answer in time, or failed each time.
        Exception: What the work raised, where another try would meet it again.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    limit_s = min(TRY_S if try_s is None else try_s, timeout_s)
    with storage_wait(doing):
        while True:
            attempt = _Attempt(work)
            if attempt.done.wait(min(limit_s, deadline - time.monotonic())):
                if attempt.error is None:
                    return attempt.result[0]
                if not is_passing(attempt.error):
                    raise attempt.error
                failure = f"{type(attempt.error).__name__}: {attempt.error}"[:300]
            else:
                failure = f"no answer for {limit_s:g} s"
            if time.monotonic() + pause_s >= deadline:
                raise HostTimeoutError(
                    f"storage did not answer within {timeout_s:g} s: {doing}; the last try: {failure}. Check the "
                    "disk, or the network and the access to the bucket, or raise trainer.distributed.timeout_s."
                ) from attempt.error
            log.warning("storage failed, the next try is in %g s: %s: %s", pause_s, doing, failure)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Attempt[Result]:
    """A call in a thread of its own, which does not keep the interpreter alive."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.done = threading.Event()
        self.result: list[Result] = []
        self.error: Exception | None = None
        threading.Thread(target=self._run, args=(work,), name="lockstep-storage", daemon=True).start()

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self.result.append(work())
        except Exception as error:
            self.error = error
        self.done.set()
