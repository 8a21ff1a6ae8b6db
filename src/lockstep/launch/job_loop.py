"""Loops of a job: over its processes, which end together, or over looks at the platform that runs it."""

import abc
import collections
import contextlib
import dataclasses
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from lockstep.exits import DONE, describe_code, is_retried
from lockstep.launch.backend import Console, Lines, Patience
from lockstep.launch.failure import LAST_LINES, Ending, failed_by_themselves, first_failure, tail_to_show

POLL_S = 0.05  # seconds between two looks at the processes
REPORT_S = 3.0
"""Seconds that the other processes have, after one failed, to report what is wrong before they get SIGTERM."""
ASKED = "the launcher asked for it"
"""The reason that a worker notes when it was told to end the command (lockstep.launch.agent.supervisor)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a job's attempt."""

    code: int
    cause: str = ""
    retry: bool = False
    detached: bool = False  # whether it goes on without the launcher


def can_retry(cause: Ending) -> bool:
    """Whether another try can help: not after an error of the user's, nor where somebody has stopped the job."""
    return cause.reason != ASKED and is_retried(cause.code)


class JobLoop(abc.ABC):
    """Processes that start and end together.

    Args:
        names: What each process is called in messages.
        grace_s: Seconds from the request to end to SIGKILL.

    Attributes:
        endings: How the processes have ended that have, by their numbers.
        stopped_by: The first signal to the launcher.
    """

    others_s: float  # seconds between SIGTERM and SIGKILL at most for what still runs after a failure
    late_s = 0.0  # seconds that a process may take to hear of the request to end, and to be heard of

    def __init__(self, names: Sequence[str], console: Console, grace_s: float) -> None:
        self.console = console
        self.lines = [Lines(functools.partial(self.show, index)) for index in range(len(names))]
        self.endings: dict[int, Ending] = {}
        self.stopped_by: int | None = None
        self._names, self._grace_s = names, grace_s
        self._last = [collections.deque[bytes](maxlen=LAST_LINES) for _ in names]
        self._begin = time.monotonic()
        self._failed_at: float | None = None  # when the first failure was heard of
        self._cause: Ending | None = None
        self._cause_text = ""
        self._signals: list[int] = []  # those to the launcher that are not passed on yet
        self._killed = False  # whether a second signal has come
        self._terminate_at = self._kill_at = math.inf

    @abc.abstractmethod
    def start(self) -> None:
        """Start the processes."""

    @abc.abstractmethod
    def listen(self, timeout_s: float) -> None:
        """Take what the processes have printed and how they ended (`lines`, `end`), and wait for it so long."""

    @abc.abstractmethod
    def signal(self, processes: Collection[int], number: int) -> None:
        """Send a signal to processes and all that they have started."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what serves the processes; their last output is taken."""

    def is_left_alone(self) -> bool:
        """Whether the job goes on without the launcher."""
        return False

    def abandon(self) -> None:  # noqa: B027
        """Wait no longer for processes that were killed and do not end, where that is possible."""

    def is_unclear(self) -> bool:
        """Whether it is not known now what has become of a running process."""
        return False

    @property
    def running(self) -> list[int]:
        """The processes that have not ended."""
        return [index for index in range(len(self._names)) if index not in self.endings]

    @property
    def is_ending(self) -> bool:
        """Whether the job is to end, by a signal or after a failure."""
        return self.stopped_by is not None or self._cause is not None

    @property
    def has_failed(self) -> bool:
        """Whether a process has failed."""
        return self._failed_at is not None

    def end(self, ending: Ending) -> None:
        """Note how a process has ended."""
        self.endings[ending.worker] = ending
        if ending.code and self._failed_at is None:
            self._failed_at = time.monotonic()

    def show(self, index: int, line: bytes) -> None:
        """Print a line of a process, and keep it for the report of a failure."""
        self._last[index].append(line)
        # After Ctrl-C the leader may still report something; N copies of a stack trace are of no use.
        if self.stopped_by is None or index == 0:
            self.console.line(index, line)

    def run(self) -> Outcome:
        """Start the processes, show what they print, and wait until all have ended; or the job is left alone."""
        with signals_to(self._signals.append):
            try:
                self.start()
                while self.running:
                    self._step()
                    if self.is_left_alone():
                        return Outcome(code=DONE, detached=True)
                self._find_cause()
            finally:
                self.close()
        if self.stopped_by is not None:
            return Outcome(code=128 + self.stopped_by, cause=f"stopped by {signal.Signals(self.stopped_by).name}")
        if self._cause is None:
            return Outcome(code=DONE)
        text = f"{self._names[self._cause.worker]}, {self._cause_text}"
        self.console.say(f"failed: {text}")
        return Outcome(code=self._cause.code, cause=text, retry=can_retry(self._cause))

    def _step(self) -> None:
        while self._signals:
            self._pass_on(self._signals.pop(0))
        self.listen(POLL_S)
        self._find_cause()
        now = time.monotonic()
        if now > self._terminate_at:
            self._terminate_at, self._kill_at = math.inf, now + min(self._grace_s, self.others_s)
            if running := self.running:
                self.console.say(f"ending the other {len(running)} process(es)")
            self.signal(running, signal.SIGTERM)
        if now > self._kill_at:
            self._kill_at = math.inf
            self.signal(self.running, signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        """Have the processes end at the first signal to the launcher, and kill them at the second."""
        running, self._terminate_at = self.running, math.inf
        if self.stopped_by is None:
            self.stopped_by = number
            self.console.say(
                f"{signal.Signals(number).name}, stopping {len(running)} process(es); they have {self._grace_s:g} s to "
                "save. Ctrl-C again kills them at once"
            )
            self.signal(running, number)
            self._kill_at = time.monotonic() + self._grace_s + self.late_s
        elif not self._killed:
            self.console.say(f"killing {len(running)} process(es)")
            self._killed, self._kill_at = True, -math.inf
        else:
            self.abandon()

    def _find_cause(self) -> None:
        """Name the failure that has ended the job, show its last lines, and give the others a moment to report."""
        if self.is_ending or self._failed_at is None:
            return
        # A process that has ended well has shown others' errors at most.
        last = [
            () if (ending := self.endings.get(index)) is not None and ending.code == DONE else lines
            for index, lines in enumerate(self._last)
        ]
        self._cause = first_failure(
            list(self.endings.values()),
            unreachable=self.is_unclear(),
            all_ended=not self.running,
            waited_s=time.monotonic() - self._failed_at,
            themselves=failed_by_themselves(last),
        )
        if self._cause is None:
            return
        index, reason = self._cause.worker, self._cause.reason
        why = f" ({reason})" if reason else ""
        self._cause_text = f"{describe_code(self._cause.code)}{why}, after {time.monotonic() - self._begin:.1f} s"
        self.console.say(f"{self._names[index]} failed, {self._cause_text}")
        source, lines = tail_to_show(index, last)
        if lines:
            self.console.say(f"{'its' if source == index else f'process {source} failed before, its'} last lines:")
            self.console.raw("".join(f"[{source}] {line.decode(errors='replace')}\n" for line in lines))
        # Where somebody has stopped the job, every worker gives its process the grace, and then ends it.
        pause_s = self._grace_s if reason == ASKED else min(self._grace_s, REPORT_S)
        self._terminate_at = time.monotonic() + pause_s


class PlatformLoop(abc.ABC):
    """A job that its platform runs, followed until it has ended.

    Args:
        noun: What a signal ends, in messages.
        stop_on_signal: Whether a signal to the launcher ends the job; else it ends the following alone.

    Attributes:
        stopped_by: The first signal.
        to_do: What a signal asks for and the platform has not been told yet.
        due: The time (`time.monotonic`) from which the platform may be asked again.
    """

    def __init__(self, console: Console, noun: str, *, stop_on_signal: bool) -> None:
        self.console, self.patience = console, Patience(console)
        self.stopped_by: int | None = None
        self.to_do: Callable[[], object] | None = None
        self.due = 0.0
        self._noun, self._stop_on_signal = noun, stop_on_signal
        self._signals: list[int] = []
        self._wake = threading.Event()

    @abc.abstractmethod
    def look(self) -> int | None:
        """Tell the platform what is to do (`tell`), show what is new, and return the job's code once it has ended."""

    @abc.abstractmethod
    def end(self, *, kill: bool) -> None:
        """Have the platform end the job, in order or at once."""

    def tell(self) -> None:
        """Tell the platform what a signal asks for, where it can be reached."""
        if self.to_do is not None and self.patience.do(self.to_do):
            self.to_do = None

    def run(self, poll_s: float) -> tuple[int, bool]:
        """Look every so many seconds; return the exit code, and whether the job has ended."""
        with signals_to(self._receive):
            while True:
                if self._signals:
                    number = self._signals.pop(0)
                    if not self._stop_on_signal:
                        return 128 + number, False
                    name, kill = signal.Signals(number).name, self.stopped_by is not None
                    self.console.say(f"{name}, {'killing' if kill else 'ending'} {self._noun}")
                    self.to_do, self.due = functools.partial(self.end, kill=kill), 0.0
                    self.stopped_by = self.stopped_by or number
                if (code := self.look()) is not None:
                    return code, True
                self._wake.wait(poll_s)
                self._wake.clear()

    def _receive(self, number: int) -> None:
        self._signals.append(number)
        self._wake.set()


@contextlib.contextmanager
def signals_to(receive: Callable[[int], object]) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and SIGHUP to a function while the block runs; under nohup, SIGHUP stays ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: receive(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int) -> None:
    """Raise `KeyboardInterrupt`; after another signal than Ctrl-C once: a terminal that closes sends SIGHUP twice."""
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_IGN)  # also for gcloud, by which a request is withdrawn now
    raise KeyboardInterrupt
