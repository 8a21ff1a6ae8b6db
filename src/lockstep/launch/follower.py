"""Followers: threads that each follow an attempt on one worker, over as many connections as that takes."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.launch.backend import LaunchError, Transport
from lockstep.launch.connection import Connection, DroppedError, answered

FIRST_SIGN_S = 60.0  # seconds that a connection may take to come about
SILENT_S = 30.0  # seconds without a sign of life (one comes every 2) after which a connection is given up and made anew
RENEW_S = 5.0  # seconds between two signs of life of the launcher at most; four of them within a lease
REPEAT_S = 1.0  # seconds between two requests to end, until it has ended
WAITING_EVENTS = 256  # events, each with at most 64 KiB of output, that may wait to be taken
DELAYS_S = (0.2, 5.0)  # seconds between two connections, at first and at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a follower has learnt."""

    worker: int
    kind: str  # `connected`, `started`, `output`, `dropped` or `result`
    data: bytes = b""
    text: str = ""  # why the connection dropped
    result: dict[str, Any] = dataclasses.field(default_factory=dict)  # how the command ended (agent.main.look)


class Follower(threading.Thread):
    """Follows an attempt on one worker until it has ended there."""

    def __init__(
        self,
        transport: Transport,
        worker: int,
        request: dict[str, Any],
        start: dict[str, Any] | None,
        offset: int,
        events: "queue.Queue[Event]",
    ) -> None:
        super().__init__(name=f"worker-{worker}", daemon=True)
        self.worker = worker
        self.connected = False
        self.away_since = time.monotonic()  # since when it is not connected
        self.started = start is None
        self.wanted = ""  # what the command is asked for: stop, kill
        self._transport, self._request, self._start, self._offset = transport, request, start, offset
        self._events = events
        self._connection: Connection | None = None
        self._sign = self._renewed = self._repeated = time.monotonic()
        self._finished = threading.Event()

    def run(self) -> None:
        """Connect, again and again, until the command has ended or nobody wants to know any more."""
        delay = DELAYS_S[0]
        while not self._finished.is_set():
            try:
                self._follow()
                return
            except DroppedError as error:
                if self.connected:
                    self.connected, self.away_since, delay = False, time.monotonic(), DELAYS_S[0]
                self._publish("dropped", text=str(error))
            except LaunchError as error:
                self._publish("result", result={"error": str(error)})
                return
            self._finished.wait(delay)
            delay = min(2 * delay, DELAYS_S[1])

    def _follow(self) -> None:
        start = None if self.started else self._start
        request = {**self._request, "op": "follow", "start": start, "offset": self._offset, "wait": True}
        self._sign = time.monotonic()
        connection = self._connection = Connection(self._transport, self.worker, request, stays=True)
        if self._finished.is_set():
            connection.end()  # `finish` came too early to see it
        try:
            for kind, data in connection.frames():
                self._sign = time.monotonic()
                if not self.connected:
                    self.connected = True
                    self._publish("connected")
                if kind == "S" and not self.started:
                    self.started = True
                    self._publish("started")
                elif kind == "O":
                    self._offset += len(data)
                    self._publish("output", data=data)
                elif kind == "R":
                    self._publish("result", result=answered(data, "follow"))
        finally:
            self._connection = None
            connection.close()

    def _publish(self, kind: str, data: bytes = b"", text: str = "", result: dict[str, Any] | None = None) -> None:
        event = Event(worker=self.worker, kind=kind, data=data, text=text, result=result or {})
        while not self._finished.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=0.2)  # who prints faster than can be shown is slowed down
                return

    def tick(self, lease_s: float | None = None) -> None:
        """Give signs of life, repeat what is wanted, and give up a connection that has none; call it often.

        Args:
            lease_s: Seconds after which the worker stops the command without them; None: it does not.
        """
        now, connection = time.monotonic(), self._connection
        if connection is None:
            return
        if now - self._sign > (SILENT_S if self.connected else FIRST_SIGN_S):
            connection.end()
        if self.connected and lease_s is not None and now - self._renewed > min(RENEW_S, lease_s / 4):
            self._renewed = now
            connection.send("renew")
        if self.connected and self.wanted and now - self._repeated > REPEAT_S:
            self._repeated = now
            connection.send(self.wanted)

    def ask(self, word: str) -> None:
        """Have the command ended: ``stop`` or ``kill``."""
        self.wanted, self._repeated = word, 0.0
        self.tick()

    def finish(self) -> None:
        """End the connection; the command goes on."""
        self._finished.set()
        connection = self._connection
        if connection is not None:
            connection.end()


class Followers:
    """The followers of an attempt.

    Args:
        roots: The job's directory on each worker.
        offsets: The bytes of each worker's log that are known.
        starts: The command on each worker (agent.supervisor.start); None: it was started.
    """

    def __init__(
        self,
        transport: Transport,
        attempt: str,
        roots: Sequence[str],
        offsets: Sequence[int],
        starts: Sequence[dict[str, Any] | None],
    ) -> None:
        self._events: queue.Queue[Event] = queue.Queue(WAITING_EVENTS)
        self.by_worker = [
            Follower(transport, index, {"root": root, "attempt": attempt}, start, offset, self._events)
            for index, (root, offset, start) in enumerate(zip(roots, offsets, starts, strict=True))
        ]

    def start(self) -> None:
        for follower in self.by_worker:
            follower.start()

    def finish(self) -> None:
        """End the connections; the command goes on."""
        for follower in self.by_worker:
            follower.finish()
        for follower in self.by_worker:
            if follower.is_alive():  # Ctrl-C may have come before it was started
                follower.join(timeout=5)

    def events(self, timeout_s: float) -> Iterator[Event]:
        """Events that have come, or come within a time; not all of them: a flood of output must hide no signal."""
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=timeout_s)
            for _ in range(WAITING_EVENTS):
                yield self._events.get_nowait()
