"""Posting values and waiting for every process, with deadlines, named culprits and no keys left behind."""

import json
from collections.abc import Callable, Sequence

from lockstep.errors import HostTimeoutError
from lockstep.hosts._client import Client
from lockstep.hosts.heartbeat import Heartbeat, heartbeats

CHUNK_BYTES = 32 << 20
"""A longer value travels in pieces of this size: one message of the service cannot hold more than 2 GiB."""


class Channel:
    """One process's end of the coordination service. Not thread-safe: every process must call in the same order.

    Args:
        client: the coordination service.
    """

    def __init__(self, client: Client):
        self.client = client
        self.heartbeat = Heartbeat(client)
        # Keys that every process will have read once the next barrier is complete. Only the leader keeps (and
        # deletes) them: a completed barrier proves that all have left every earlier operation.
        self._spent: list[str] = []

    def barrier(self, key: str, timeout_s: float) -> None:
        """Wait until every process is here, then delete what earlier operations left.

        Raises:
            HostTimeoutError: not all came within ``timeout_s``.
        """
        self.heartbeat.wait_at(key)
        try:
            self.client.barrier(key, timeout_s)
        except TimeoutError as error:
            raise self._late("barrier", key, timeout_s, None) from error
        spent, self._spent = self._spent, []
        for old in spent:
            self.client.delete(old)

    def post(self, key: str, value: bytes) -> None:
        """Store this process's value under ``key``, in pieces when it is long."""
        place = f"{key}/{self.client.index}"
        rest = range(CHUNK_BYTES, len(value), CHUNK_BYTES)
        for piece, start in enumerate(rest):
            self.client.set(f"{place}/{piece}", value[start : start + CHUNK_BYTES])
        # Last, so that who sees it finds the rest.
        self.client.set(place, len(rest).to_bytes(4, "big") + value[:CHUNK_BYTES])

    def read(self, key: str, process: int, timeout_s: float) -> bytes:
        """Wait for what ``process`` posts under ``key``.

        Raises:
            HostTimeoutError: nothing came within ``timeout_s``.
        """
        place = f"{key}/{process}"
        try:
            head = self.client.get(place, timeout_s)
            pieces = range(int.from_bytes(head[:4], "big"))
            return b"".join([head[4:], *(self.client.get(f"{place}/{piece}", timeout_s) for piece in pieces)])
        except TimeoutError as error:
            raise self._late("read", key, timeout_s, [process]) from error

    def exchange[T](self, key: str, value: T, timeout_s: float, decode: Callable[[object], T]) -> list[T]:
        """Post a short JSON value and return those of all processes, by process number.

        Raises:
            HostTimeoutError: not all came within ``timeout_s``.
        """
        self.client.set(f"{key}/{self.client.index}", json.dumps(value).encode())
        self.barrier(key, timeout_s)
        posts = self.client.get_dir(key)
        self.spend(key)
        texts = [posts[f"{key}/{process}"] for process in range(self.client.count)]
        # Most often all have posted the same: with many processes that is worth seeing.
        values = {text: decode(json.loads(text)) for text in set(texts)}
        return [values[text] for text in texts]

    def spend(self, key: str) -> None:
        """Have the leader delete ``key`` and all below it once the next barrier is complete."""
        if self.client.index == 0:
            self._spent.append(key)

    def _late(self, kind: str, key: str, timeout_s: float, missing: Sequence[int] | None) -> HostTimeoutError:
        beats = heartbeats(self.client)
        if missing is None:
            missing = [i for i in range(self.client.count) if i not in beats or key not in beats[i].waits]
        silent = [i for i in missing if i in beats and beats[i].silent]
        alive = [f"process {i} ({beats[i]})" for i in missing if silent and i not in silent and i in beats]
        first = silent or missing
        who = [f"process {i} ({beats[i]})" if i in beats else f"process {i} (never seen)" for i in first]
        elsewhere = [f"process {i} waits at {beats[i].waits[-1]!r}" for i in missing if i in beats and beats[i].waits]
        text = f"{kind} {key!r} timed out after {timeout_s:g} s on process {self.client.index} of {self.client.count}. "
        if who:
            text += f"Missing: {', '.join(who)}. "
        else:
            text += "Every process has come by now, but at least one of them after the deadline. "
        if alive:
            text += f"Alive, but not here: {', '.join(alive)}. "
        if elsewhere:
            text += f"Their last wait: {', '.join(elsewhere)}. "
        return HostTimeoutError(
            text + "Every process must make the same calls in the same order: look for the first error in the logs of "
            "the missing ones, or raise timeout_s if they are only slow."
        )
