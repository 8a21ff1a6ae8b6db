"""One attempt: the command on all workers, followed until all have ended, or the first failure has ended the rest."""

import collections
import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.exits import (
    DONE,
    SETUP_FAILED,
    TERMINATED,
    UNREACHABLE,
    WORKER_LOST,
    describe_code,
    is_retried,
)
from lockstep.files import private
from lockstep.launch.backend import Console, Transport
from lockstep.launch.connection import WAITING_EVENTS, Event, Follower
from lockstep.launch.failure import LAST_LINES, Ending, failed_by_themselves, first_failure, tail_to_show
from lockstep.launch.processes import REPORT_S, signals_to

UNCLEAR_S = 20.0
"""Seconds after a failure for which a worker that cannot be reached may come back; then it was the cause."""
ASKED = "the launcher asked for it"
"""The reason that a worker notes when it was told to end the command (lockstep.launch.agent.supervisor)."""


def can_retry(cause: Ending) -> bool:
    """Whether another try can help: not after an error of the user's, nor where somebody has stopped the job."""
    return cause.reason != ASKED and is_retried(cause.code)


POLL_S = 0.05
OTHERS_S = 10.0
"""Seconds between SIGTERM and SIGKILL at most for what still runs after a failure: it waits for who is gone."""
GIVE_UP_S = 15.0  # seconds for which a worker that cannot be reached is waited for when the job is to end anyway
QUESTION_S = 10.0  # seconds between two questions to the platform whether it has taken workers away
DETACH_S = 1.0  # seconds for which a job that is left alone is watched first: what cannot start has ended by then


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an attempt."""

    code: int
    cause: str = ""
    retry: bool = False
    detached: bool = False  # whether it goes on without the launcher


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """The command of an attempt, and its time limits."""

    id: str
    roots: Sequence[str]  # the job's directory on each worker
    starts: Sequence[Mapping[str, Any]]  # of the command on each worker (agent.supervisor.start)
    logs: Sequence[Path]
    skews_s: Sequence[float | None]  # seconds by which each worker's clock is ahead; None: not known
    foreground: bool  # whether the job ends with the launcher
    grace_s: float
    lease_s: float  # seconds after which a worker that hears nothing of the launcher stops the job
    unreachable_s: float  # seconds until a worker counts as lost


class RunningAttempt:
    """The command on all workers.

    Args:
        why_lost: The platform's word on workers that it has taken away.
        given_up: Whether somebody has stopped or deleted the job.
    """

    def __init__(
        self,
        transport: Transport,
        spec: AttemptSpec,
        console: Console,
        why_lost: Callable[[], str | None],
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._workers, self._spec, self._console, self._why_lost = transport.workers, spec, console, why_lost
        self._given_up = given_up
        count = len(transport.workers)
        self._events: queue.Queue[Event] = queue.Queue(WAITING_EVENTS)
        self._followers = [
            Follower(
                transport,
                index,
                {"root": spec.roots[index], "attempt": spec.id},
                dict(spec.starts[index]),
                0,
                self._events,
            )
            for index in range(count)
        ]
        self._rest = [b""] * count
        self._last = [collections.deque[bytes](maxlen=LAST_LINES) for _ in range(count)]
        for path in spec.logs:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._logs = [open(path, "wb", buffering=0, opener=private) for path in spec.logs]
        self._endings: dict[int, Ending] = {}
        self._cause: Ending | None = None
        self._cause_text = ""
        self._first_failure: float | None = None  # when the first failure was heard of
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._received: list[int] = []
        self._stopped_by: int | None = None
        self._killed = False
        self._begin = time.monotonic()
        self._all_started: float | None = None
        self._asking: threading.Thread | None = None
        self._question_at = time.monotonic()
        self._taken = ""  # what the platform has said

    def run(self) -> Outcome:
        """Start the command everywhere, show output, and wait for the end; without foreground, for the start."""
        with signals_to(self._received.append):
            for follower in self._followers:
                follower.start()
            try:
                while len(self._endings) < len(self._followers):
                    self._step()
                    if self._left_alone():
                        return Outcome(code=DONE, detached=True)
                self._find_cause()
            finally:
                for follower in self._followers:
                    follower.finish()
                for follower in self._followers:
                    follower.join(timeout=5)
                self._take_events(0.0)
                for log in self._logs:
                    log.close()
        return self._outcome()

    def _step(self) -> None:
        self._pass_signals_on()
        self._take_events(POLL_S)
        now = time.monotonic()
        for follower in self._followers:
            if follower.worker not in self._endings:
                follower.tick(self._spec.lease_s if self._spec.foreground else None)
        self._find_lost(now)
        self._find_cause()
        if self._terminate_at is not None and now > self._terminate_at:
            self._terminate_at, self._kill_at = None, now + min(self._spec.grace_s, OTHERS_S)
            others = self._running()
            if others:
                self._console.say(f"ending the other {len(others)} process(es)")
            for follower in others:
                follower.ask("stop")
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = None
            for follower in self._running():
                follower.ask("kill")

    def _running(self) -> list[Follower]:
        return [follower for follower in self._followers if follower.worker not in self._endings]

    def _left_alone(self) -> bool:
        """Whether it runs everywhere, and is to run without the launcher."""
        if self._spec.foreground or self._endings or self._stopped_by is not None:
            return False
        if self._all_started is None and all(follower.started for follower in self._followers):
            self._all_started = time.monotonic()
        return self._all_started is not None and time.monotonic() - self._all_started > DETACH_S

    def _take_events(self, timeout_s: float) -> None:
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            for _ in range(WAITING_EVENTS):  # no more: a flood of output must not hide a failure or a signal
                self._take(event)
                event = self._events.get_nowait()
        except queue.Empty:
            pass

    def _take(self, event: Event) -> None:
        index, name = event.worker, self._workers[event.worker].name
        if event.kind == "output":
            self._logs[index].write(event.data)
            *lines, self._rest[index] = (self._rest[index] + event.data).split(b"\n")
            for line in lines:
                self._show(index, line)
        elif event.kind == "dropped" and index not in self._endings:
            self._console.once(f"worker {name} cannot be reached, trying again: {event.text}")
        elif event.kind == "connected":
            if self._console.forget(f"worker {name} cannot be reached, "):
                self._console.say(f"worker {name} is reached again")
        elif event.kind == "started" and self._given_up():
            self._followers[index].ask("stop")  # it has come to the worker before the command had
        elif event.kind == "result" and index not in self._endings:
            if self._rest[index]:
                self._show(index, self._rest[index])
                self._rest[index] = b""
            self._end(self._ending(index, event.result))

    def _ending(self, index: int, result: dict[str, Any]) -> Ending:
        now, skew = time.time(), self._spec.skews_s[index]
        if "error" in result:
            return Ending(worker=index, code=SETUP_FAILED, at=now, reason=result["error"])
        if result["state"] != "ended" and self._given_up():
            return Ending(worker=index, code=TERMINATED, at=now, reason=ASKED)
        if result["state"] != "ended":
            reason = "its processes are gone without a word: the machine was restarted, or replaced"
            return Ending(worker=index, code=WORKER_LOST, at=now, reason=reason)
        at = now if skew is None else result["ended"] - skew
        return Ending(worker=index, code=result["code"], at=at, reason=result["reason"])

    def _end(self, ending: Ending) -> None:
        self._endings[ending.worker] = ending
        if ending.code and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _show(self, index: int, line: bytes) -> None:
        self._last[index].append(line)
        # After Ctrl-C the leader may still report something; N copies of a stack trace are of no use.
        if self._stopped_by is None or index == 0:
            self._console.line(f"[{index}] ", line)

    def _find_lost(self, now: float) -> None:
        """End the wait for workers that cannot be reached, once they were given time or the platform has taken them."""
        away = [follower for follower in self._running() if not follower.connected]
        if not away:
            self._taken = ""  # it was of workers that have come back
            return
        ending = self._stopped_by is not None or self._cause is not None
        patience = min(self._spec.unreachable_s, GIVE_UP_S if ending else self._spec.unreachable_s)
        if self._first_failure is not None:
            patience = min(patience, UNCLEAR_S)
        for follower in away:
            seconds = now - follower.away_since
            if self._taken or seconds > patience:
                name = self._workers[follower.worker].name
                reason = self._taken or f"it could not be reached for {seconds:.0f} s"
                code = WORKER_LOST if follower.started else UNREACHABLE
                self._end(Ending(worker=follower.worker, code=code, at=time.time() - seconds, reason=reason))
                if follower.started and self._spec.foreground:
                    self._console.say(
                        f"worker {name}: {reason}; if it still runs, it stops the command by itself "
                        f"{self._spec.lease_s:g} s after it has last heard of this launcher"
                    )
        if now - self._question_at > QUESTION_S and (self._asking is None or not self._asking.is_alive()):
            self._question_at = now
            self._asking = threading.Thread(target=self._ask_platform, daemon=True)
            self._asking.start()

    def _ask_platform(self) -> None:
        try:
            self._taken = self._why_lost() or ""
        except Exception as error:
            self._console.once(f"the platform does not say what became of the workers: {error}")

    def _find_cause(self) -> None:
        """Name the failure that has ended the job, show its last lines, and give the others a moment to report."""
        if self._cause is not None or self._stopped_by is not None or self._first_failure is None:
            return
        # A worker that has ended well has shown others' errors at most.
        last = [
            () if (end := self._endings.get(index)) is not None and end.code == DONE else lines
            for index, lines in enumerate(self._last)
        ]
        self._cause = first_failure(
            list(self._endings.values()),
            unreachable=any(not follower.connected for follower in self._running()),
            all_ended=len(self._endings) == len(self._followers),
            waited_s=time.monotonic() - self._first_failure,
            themselves=failed_by_themselves(last),
        )
        if self._cause is None:
            return
        index = self._cause.worker
        why = f" ({self._cause.reason})" if self._cause.reason else ""
        self._cause_text = f"{describe_code(self._cause.code)}{why}, after {time.monotonic() - self._begin:.1f} s"
        self._console.say(f"worker {self._workers[index].name} (process {index}) failed, {self._cause_text}")
        source, lines = tail_to_show(index, last)
        if lines:
            self._console.say(f"{'its' if source == index else f'process {source} failed before, its'} last lines:")
            self._console.raw("".join(f"[{source}] {line.decode(errors='replace')}\n" for line in lines))
        # Where somebody has stopped the job, every worker gives its process the grace, and then ends it.
        grace_s = self._spec.grace_s
        self._terminate_at = time.monotonic() + (grace_s if self._cause.reason == ASKED else min(grace_s, REPORT_S))

    def _pass_signals_on(self) -> None:
        while self._received:
            number = self._received.pop(0)
            again, self._stopped_by = self._stopped_by is not None, self._stopped_by or number
            self._terminate_at = None
            count = len(self._running())
            if again and self._killed:
                self._console.say(f"no longer waiting for {count} process(es); what still runs is stopped by its lease")
                for follower in self._running():
                    self._end(Ending(worker=follower.worker, code=UNREACHABLE, at=time.time()))
                continue
            if again:
                self._console.say(f"killing {count} process(es)")
                self._killed, self._kill_at = True, time.monotonic()
                continue
            self._console.say(
                f"{signal.Signals(number).name}, stopping {count} process(es); they have {self._spec.grace_s:g} s to "
                "save. Ctrl-C again kills them at once"
            )
            for follower in self._running():
                follower.ask("stop")
            self._kill_at = time.monotonic() + self._spec.grace_s + REPORT_S

    def _outcome(self) -> Outcome:
        if self._stopped_by is not None:
            return Outcome(code=128 + self._stopped_by, cause=f"stopped by {signal.Signals(self._stopped_by).name}")
        if self._cause is None:
            return Outcome(code=DONE)
        name = self._workers[self._cause.worker].name
        text = f"worker {name} (process {self._cause.worker}), {self._cause_text}"
        self._console.say(f"failed: {text}")
        return Outcome(code=self._cause.code, cause=text, retry=can_retry(self._cause))
