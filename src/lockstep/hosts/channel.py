"""Posting values and waiting for every process, with deadlines, errors that name who is missing, and no keys left."""

import json
from collections.abc import Callable, Sequence

from lockstep.errors import HostError, HostTimeoutError
from lockstep.hosts._client import Client
from lockstep.hosts.heartbeat import Heartbeat, heartbeats

CHUNK_BYTES = 32 << 20
"""Bytes of a piece of a longer value: one message of the service cannot have more than 2 GiB."""


class Channel:
    """One process's end of the coordination service. Not thread-safe: every process must call in the same order.

    Args:
        client: The coordination service.
    """

    def __init__(self, client: Client):
        self.client = client
        self.heartbeat = Heartbeat(client)
        self.warned: set[str] = set()
        """Differences between the processes that this one has warned of."""
        # Keys that every process will have read once the next barrier is complete. Only the leader keeps (and
        # deletes) them: a completed barrier proves that all have left every earlier operation.
        self._keys_to_delete: list[str] = []

    def barrier(self, key: str, timeout_s: float, name: str | None = None) -> None:
        """Wait until every process is here; the leader then deletes the keys of earlier operations.

        Args:
            key: The key that errors name.
            timeout_s: The seconds to wait for the other processes.
            name: The barrier's name at the service, which may be used again; None for the key.

        Raises:
            HostTimeoutError: Not all came within ``timeout_s``; names the missing ones and their last phase.
        """
        self.heartbeat.wait_at(key)
        try:
            self.client.barrier(key if name is None else name, timeout_s)
        except TimeoutError as error:
            raise self._timeout_error("barrier", key, timeout_s, None) from error
        keys, self._keys_to_delete = self._keys_to_delete, []
        for old in keys:
            self.client.delete(old)

    def post(self, key: str, value: bytes) -> None:
        """Store this process's value under ``key``, in pieces when it is long."""
        place = f"{key}/{self.client.index}"
        rest = range(CHUNK_BYTES, len(value), CHUNK_BYTES)
        for piece, start in enumerate(rest):
            self.client.set(f"{place}/{piece}", value[start : start + CHUNK_BYTES])
        # Last, so that a process that finds the head finds the other pieces too.
        self.client.set(place, len(rest).to_bytes(4, "big") + value[:CHUNK_BYTES])

    def read(self, key: str, process: int, timeout_s: float) -> bytes:
        """Wait for what ``process`` posts under ``key``.

        Raises:
            HostTimeoutError: Nothing came within ``timeout_s``; names the process and its last phase.
        """
        place = f"{key}/{process}"
        try:
            head = self.client.get(place, timeout_s)
            pieces = range(int.from_bytes(head[:4], "big"))
            return b"".join([head[4:], *(self.client.get(f"{place}/{piece}", timeout_s) for piece in pieces)])
        except TimeoutError as error:
            raise self._timeout_error("read", key, timeout_s, [process]) from error

    def exchange[T](self, key: str, value: T, timeout_s: float, decode: Callable[[object], T]) -> list[T]:
        """Post a short JSON value and return those of all processes, by process number.

        Raises:
            HostTimeoutError: Not all came within ``timeout_s``; names the missing ones and their last phase.
        """
        self.client.set(f"{key}/{self.client.index}", json.dumps(value).encode())
        self.barrier(key, timeout_s)
        posts = self.client.get_dir(key)
        self.delete_after_barrier(key)
        # Most often all have posted the same text: each different one is parsed once, whatever the number of processes.
        values: dict[bytes | None, T] = {}
        found = []
        for process in range(self.client.count):
            text = posts.get(f"{key}/{process}")
            if text not in values:
                try:
                    values[text] = decode(json.loads(text or b""))
                except (ValueError, TypeError, RecursionError):
                    raise HostError(
                        f"what process {process} has posted at {key!r} is not of this exchange. Look for processes of "
                        "another version, and for who else reaches the coordination service (docs/security.md)."
                    ) from None
            found.append(values[text])
        return found

    def delete_after_barrier(self, key: str) -> None:
        """Have the leader delete ``key`` and all below it once the next barrier is complete."""
        if self.client.index == 0:
            self._keys_to_delete.append(key)

    def _timeout_error(self, kind: str, key: str, timeout_s: float, missing: Sequence[int] | None) -> HostTimeoutError:
        """Say who is missing at ``key`` and what each process did last; ``missing`` None: find out who has not come."""
        peers = heartbeats(self.client)
        if missing is None:
            missing = [i for i in range(self.client.count) if i not in peers or key not in peers[i].waits]
        silent = [i for i in missing if i in peers and peers[i].silent]
        alive = [f"process {i} ({peers[i]})" for i in missing if silent and i not in silent and i in peers]
        first = silent or missing
        who = [f"process {i} ({peers[i]})" if i in peers else f"process {i} (never seen)" for i in first]
        elsewhere = [f"process {i} waits at {peers[i].waits[-1]!r}" for i in missing if i in peers and peers[i].waits]
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
