"""The time that SIGTERM leaves for a save: what is said of it, and when storage is waited for no more."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lockstep.hosts import Hosts
from lockstep.printable import get_logger
from lockstep.training.checkpoints.search import SHARED_BY

if TYPE_CHECKING:
    from etils import epath

log = get_logger(__name__)

ANSWER_S = 10.0  # seconds that storage may take to answer, once the time that SIGTERM leaves is over


class Grace:
    """The time that SIGTERM leaves; one object for all of a run.

    Args:
        grace_s: The seconds.
        path: The directory of the checkpoints.
    """

    def __init__(self, grace_s: float, path: "epath.Path", hosts: Hosts) -> None:
        self._grace_s, self._path, self._hosts = grace_s, path, hosts
        self.probe_at = math.inf  # when storage is asked the next time, by this process's clock; never before a signal
        self.storage_is_silent = False  # whether it did not answer; the leader asks, and tells the others

    def age_s(self) -> float:
        """Return the seconds since the first process was asked to end, the same on every process, which all ask."""
        with self._hosts.run_on_all("time since the signal") as phase:
            phase.share(self._hosts.preemption.age_s)
        age_s = max(phase.shared)
        self.probe_at = min(self.probe_at, time.monotonic() + max(0.0, self._grace_s - age_s))
        return age_s

    def probe(self) -> bool:
        """Ask storage where it is time to; return whether it has stopped answering."""
        if time.monotonic() >= self.probe_at:
            self.storage_is_silent = not answers(self._path / SHARED_BY, ANSWER_S)
            self.probe_at = time.monotonic() + max(ANSWER_S, self._grace_s)
        return self.storage_is_silent

    @contextlib.contextmanager
    def warnings(
        self, age_s: float, last_s: float | None, written: Callable[[], int], otherwise: Callable[[], str]
    ) -> Iterator[None]:
        """Warn where the save that the block makes may not fit in the time left, and where it did not.

        Args:
            age_s: The seconds since the signal.
            last_s: The seconds that the last save took; None where there was none.
            written: Returns the step that is being saved.
            otherwise: Returns from where the run would go on, as the end of a sentence.
        """
        if last_s is not None and last_s > self._grace_s - age_s:
            log.warning(
                "the last checkpoint took %.1f s, and of the %g s that SIGTERM leaves (checkpointer.grace_s) %.1f s "
                "are over: this one may not be complete in time, and the run then goes on %s",
                last_s,
                self._grace_s,
                age_s,
                otherwise(),
            )

        def late() -> None:
            log.error(
                "the checkpoint of step %d is not complete %g s after SIGTERM (checkpointer.grace_s): if the machine "
                "is taken away now, the run goes on %s",
                written(),
                self._grace_s,
                otherwise(),
            )

        timer = threading.Timer(max(0.0, self._grace_s - age_s), late)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def answers(file: "epath.Path", timeout_s: float) -> bool:
    """Whether a file can be read in time; a thread reads it, so a storage that hangs does not hold the caller up.

    Libraries answer from memory what else could be asked of a bucket.
    """
    answered = threading.Event()

    def read() -> None:
        with contextlib.suppress(Exception):  # such as a network that is down
            file.read_bytes()
            answered.set()

    threading.Thread(target=read, name="lockstep-storage-probe", daemon=True).start()
    return answered.wait(timeout_s)
