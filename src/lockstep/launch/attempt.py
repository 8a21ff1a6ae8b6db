"""One attempt: the command on all workers, followed until all have ended, or the first failure has ended the rest."""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from lockstep.exits import SETUP_FAILED, TERMINATED, UNREACHABLE, WORKER_LOST
from lockstep.files import private
from lockstep.launch.backend import Console, Transport
from lockstep.launch.failure import Ending
from lockstep.launch.follower import Event, Follower, Followers
from lockstep.launch.job_loop import ASKED, REPORT_S, JobLoop

UNCLEAR_S = 20.0
"""Seconds after a failure for which a worker that cannot be reached may come back; then it was the cause."""
GIVE_UP_S = 15.0  # seconds for which a worker that cannot be reached is waited for when the job is to end anyway
QUESTION_S = 10.0  # seconds between two questions to the platform whether it has taken workers away
DETACH_S = 1.0  # seconds for which a job that is left alone is watched first: what cannot start has ended by then


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """The command of an attempt, and its time limits."""

    id: str
    roots: Sequence[str]  # the job's directory on each worker
    starts: Sequence[dict[str, Any]]  # of the command on each worker (agent.supervisor.start)
    logs: Sequence[Path]
    skews_s: Sequence[float | None]  # seconds by which each worker's clock is ahead; None: not known
    foreground: bool  # whether the job ends with the launcher
    grace_s: float
    lease_s: float  # seconds after which a worker that hears nothing of the launcher stops the job
    unreachable_s: float  # seconds until a worker counts as lost


class RunningAttempt(JobLoop):
    """The command on all workers.

    Args:
        why_lost: The platform's word on workers that it has taken away.
        given_up: Whether somebody has stopped or deleted the job.
    """

    others_s = 10.0
    late_s = REPORT_S

    def __init__(
        self,
        transport: Transport,
        spec: AttemptSpec,
        console: Console,
        why_lost: Callable[[], str | None],
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._workers, self._spec, self._why_lost, self._given_up = transport.workers, spec, why_lost, given_up
        names = [f"worker {worker.name} (process {index})" for index, worker in enumerate(transport.workers)]
        super().__init__(names, console, spec.grace_s)
        self._followers = Followers(transport, spec.id, spec.roots, [0] * len(names), spec.starts)
        self._logs = [open(path, "wb", buffering=0, opener=private) for path in spec.logs]
        self._all_started: float | None = None
        self._asking: threading.Thread | None = None
        self._question_at = time.monotonic()
        self._taken = ""  # what the platform has said

    def start(self) -> None:
        self._followers.start()

    def close(self) -> None:
        self._followers.finish()
        self._take_events(0.0)
        for log in self._logs:
            log.close()

    def listen(self, timeout_s: float) -> None:
        self._take_events(timeout_s)
        for index in self.running:
            self._followers.by_worker[index].tick(self._spec.lease_s if self._spec.foreground else None)
        self._find_lost(time.monotonic())

    def signal(self, processes: Collection[int], number: int) -> None:
        for index in processes:
            self._followers.by_worker[index].ask("kill" if number == signal.SIGKILL else "stop")

    def abandon(self) -> None:
        running = self.running
        self.console.say(f"no longer waiting for {len(running)} process(es); what still runs is stopped by its lease")
        for index in running:
            self.end(Ending(worker=index, code=UNREACHABLE, at=time.time()))

    def is_unclear(self) -> bool:
        return bool(self._away())

    def is_left_alone(self) -> bool:
        """Whether it runs everywhere, and is to run without the launcher."""
        if self._spec.foreground or self.endings or self.stopped_by is not None:
            return False
        if self._all_started is None and all(self._followers.by_worker[index].started for index in self.running):
            self._all_started = time.monotonic()
        return self._all_started is not None and time.monotonic() - self._all_started > DETACH_S

    def _away(self) -> list[Follower]:
        """The followers of workers that cannot be reached at the moment."""
        running = (self._followers.by_worker[index] for index in self.running)
        return [follower for follower in running if not follower.connected]

    def _take_events(self, timeout_s: float) -> None:
        for event in self._followers.events(timeout_s):
            self._take(event)

    def _take(self, event: Event) -> None:
        index, name = event.worker, self._workers[event.worker].name
        if event.kind == "output":
            self._logs[index].write(event.data)
            self.lines[index].feed(event.data)
        elif event.kind == "dropped" and index not in self.endings:
            self.console.once(f"worker {name} cannot be reached, trying again: {event.text}")
        elif event.kind == "connected":
            if self.console.forget(f"worker {name} cannot be reached, "):
                self.console.say(f"worker {name} is reached again")
        elif event.kind == "started" and self._given_up():
            self._followers.by_worker[index].ask("stop")  # it has come to the worker before the command had
        elif event.kind == "result" and index not in self.endings:
            self.lines[index].end()
            self.end(self._ending(index, event.result))

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

    def _find_lost(self, now: float) -> None:
        """End the wait for workers that cannot be reached, once they were given time or the platform has taken them."""
        away = self._away()
        if not away:
            self._taken = ""  # it was of workers that have come back
            return
        patience = min(self._spec.unreachable_s, GIVE_UP_S if self.is_ending else self._spec.unreachable_s)
        if self.has_failed:
            patience = min(patience, UNCLEAR_S)
        for follower in away:
            seconds = now - follower.away_since
            if self._taken or seconds > patience:
                name = self._workers[follower.worker].name
                reason = self._taken or f"it could not be reached for {seconds:.0f} s"
                code = WORKER_LOST if follower.started else UNREACHABLE
                self.end(Ending(worker=follower.worker, code=code, at=time.time() - seconds, reason=reason))
                if follower.started and self._spec.foreground:
                    self.console.say(
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
            self.console.once(f"the platform does not say what became of the workers: {error}")
