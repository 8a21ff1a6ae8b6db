"""Posting values and waiting for every process, with deadlines, errors that name who is missing, and no keys left.

Who waits longer than ``timeout_s`` raises HostTimeoutError, which names the missing processes and their last phase.
"""

import array
import binascii
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import HostError, HostTimeoutError
from lockstep.hosts._client import Client
from lockstep.hosts.heartbeat import MISSING, Heartbeat, heartbeats, longest_silent
from lockstep.json_text import typed
from lockstep.printable import printable

CHUNK_BYTES = 32 << 20  # bytes of a piece of a longer value: one message of the service cannot have more than 2 GiB

LATE = "late"  # the last part of the key of what that process says of those that did not come in time
LATE_S = 5.0  # seconds that it has for that
COMBINED = "all"  # the last part of the key of what the process with the service makes of all values of an exchange
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors of a value that is none of an exchange."""
_INTEGERS = ("i", "q")  # the types of arrays of integers that travel as one text

type Column = tuple[list[Any] | array.array[int], list[int] | None]
"""One value of each process: each different value once, and which of them each process has; see `columns`."""


class Channel:
    """One process's end of the coordination service. Not thread-safe: every process must call in the same order."""

    def __init__(self, client: Client):
        self.client = client
        self.heartbeat = Heartbeat(client)
        self.warned: set[str] = set()  # differences between the processes that this one has warned of
        # Keys that every process will have read once the next barrier is complete. Only the leader keeps (and
        # deletes) them: a completed barrier proves that all have left every earlier operation.
        self._keys_to_delete: list[str] = []

    def barrier(self, key: str, timeout_s: float, name: str | None = None) -> None:
        """Wait until every process is here; the leader then deletes the keys of earlier operations.

        Args:
            name: The barrier's name at the service, which may be used again; None for the key.
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
        """Wait for what ``process`` posts under ``key``."""
        place = f"{key}/{process}"
        try:
            head = self.client.get(place, timeout_s)
            pieces = range(int.from_bytes(head[:4], "big"))
            return b"".join([head[4:], *(self.client.get(f"{place}/{piece}", timeout_s) for piece in pieces)])
        except TimeoutError as error:
            raise self._timeout_error("read", key, timeout_s, [process]) from error

    def exchange[T](
        self,
        key: str,
        value: object,
        timeout_s: float,
        combine: Callable[[list[Any]], object],
        decode: Callable[[Any], T],
    ) -> T:
        """Post a short JSON value, and return what ``combine`` makes of those of all processes, by process number.

        The process with the service alone reads all values, and posts the result: bytes grow with the number of
        processes, not with its square, and every wait has a deadline.

        Args:
            combine: A function of one value or more to a JSON value, the same on every process.
            decode: What is returned, from the value that ``combine`` has made. Both raise ValueError, TypeError or
                LookupError for what is none of this exchange.

        Raises:
            HostError: On every process, with the same text: one has posted what is no value of this exchange.
        """
        self.client.set(f"{key}/{self.client.index}", json.dumps(value).encode())
        self.barrier(key, timeout_s)
        runner = self.client.processes[0]
        try:
            if self.client.index == runner:
                text = self._combined(key, combine, decode)
                self.client.set(f"{key}/{COMBINED}", text)
            else:
                text = self.client.get(f"{key}/{COMBINED}", timeout_s)
        except TimeoutError as error:
            raise self._timeout_error("read", key, timeout_s, [runner]) from error
        self.delete_after_barrier(key)
        wrong = f"process {runner} has posted"
        with contextlib.suppress(*UNREADABLE):
            wrong, result = json.loads(text)
            if wrong is None:
                wrong = f"process {runner} has posted"
                return decode(result)
        raise HostError(
            f"what {printable(str(wrong))} at {key!r} is not of this exchange. Look for processes of another version, "
            "and for who else reaches the coordination service (docs/security.md)."
        )

    def _combined(self, key: str, combine: Callable[[list[Any]], object], decode: Callable[[Any], object]) -> bytes:
        """The error of what was posted, None where there is none, and the result of ``combine``."""

        def result_of(texts: Sequence[bytes]) -> object:
            # Most often all have posted the same text: each different one is parsed once.
            parsed = {text: json.loads(text) for text in {*texts}}
            result = combine([parsed[text] for text in texts])
            decode(result)
            return result

        posts = self.client.get_dir(key)
        texts = [posts.get(f"{key}/{process}", b"") for process in range(self.client.count)]
        with contextlib.suppress(*UNREADABLE):
            return json.dumps([None, result_of(texts)], separators=(",", ":")).encode()
        for process, text in enumerate(texts):
            try:
                result_of([text])
            except UNREADABLE:
                return json.dumps([f"process {process} has posted", None]).encode()
        return json.dumps([None, None]).encode()  # no two of them can be of the same exchange

    def delete_after_barrier(self, key: str) -> None:
        """Have the leader delete ``key`` and all below it once the next barrier is complete."""
        if self.client.index == 0:
            self._keys_to_delete.append(key)

    def _timeout_error(self, kind: str, key: str, timeout_s: float, missing: Sequence[int] | None) -> HostTimeoutError:
        """Say who is missing at ``key`` and what each of them did last; ``missing`` None: whoever has not come."""
        text = f"{kind} {key!r} timed out after {timeout_s:g} s on process {self.client.index} of {self.client.count}. "
        return HostTimeoutError(
            text
            + (self._who_is_late(key) if missing is None else self._describe(key, missing))
            + "Every process must make the same calls in the same order: look for the first error in the logs of "
            "the missing ones, or raise timeout_s if they are only slow."
        )

    def _who_is_late(self, key: str) -> str:
        """Say who has not come to a barrier: all time out at once, and the process with the service reads for all."""
        runner, place = self.client.processes[0], f"{key}/{LATE}"
        if self.client.index == runner:
            text = self._describe(key, None)
            with contextlib.suppress(HostError, TimeoutError):
                self.client.set(place, text.encode())
                self.delete_after_barrier(key)
            return text
        last = heartbeats(self.client, [runner]).get(runner)
        if last is not None and key in last.waits and not last.silent:
            with contextlib.suppress(HostError, TimeoutError):
                return printable(self.client.get(place, LATE_S).decode(errors="replace"))
        return self._describe(key, None)

    def _describe(self, key: str, missing: Sequence[int] | None) -> str:
        """The last phase of each of the missing, as text; None: of those that have not come to ``key``."""
        peers = heartbeats(self.client, missing)
        if missing is None:
            missing = [i for i in range(self.client.count) if i not in peers or key not in peers[i].waits]
        silent = [i for i in longest_silent(peers) if i in missing]
        alive = [f"process {i} ({peers[i]})" for i in missing if silent and i not in silent and i in peers]
        first = silent or missing
        absent = [f"process {i} ({peers[i]})" if i in peers else f"process {i} (never seen)" for i in first]
        elsewhere = [f"process {i} waits at {peers[i].waits[-1]!r}" for i in missing if i in peers and peers[i].waits]
        text = ""
        if absent:
            text += f"{MISSING}{', '.join(absent)}. "
        else:
            text += "Every process has come by now, but at least one of them after the deadline. "
        if alive:
            text += f"Alive, but not here: {', '.join(alive)}. "
        if elsewhere:
            text += f"Their last wait: {', '.join(elsewhere)}. "
        return text


def columns(rows: Sequence[Sequence[object]]) -> list[tuple[list[Any] | str, list[int] | None]]:
    """Return rows by column: each different value once, and which of them each row has.

    None in place of the latter: all have the same, or each its own, and such numbers are one text (`_packed`). An
    exchange sends it to every process where all need what each has posted.

    Args:
        rows: A list of JSON values for each process, all of the same length.
    """
    by_column: list[tuple[list[Any] | str, list[int] | None]] = []
    for column in zip(*rows, strict=True):
        numbers: dict[object, int] = {}
        values: list[object] = []
        indices = []
        for value in column:
            # Numbers and texts themselves, and what they are: 1 and True are equal.
            key = (type(value), value) if type(value) in (int, str, bool) else json.dumps(value)
            number = numbers.setdefault(key, len(numbers))
            if number == len(values):
                values.append(value)
            indices.append(number)
        plain = len(values) in (1, len(indices))
        by_column.append((_packed(values) if plain else values, None if plain else indices))
    return by_column


def _packed(values: list[Any]) -> list[Any] | str:
    """Integers, one of each process, as a text: a thousand processes read it in a third of the time of a JSON list."""
    if len(values) == 1 or set(map(type, values)) != {int}:
        return values
    for kind in _INTEGERS:
        with contextlib.suppress(OverflowError):
            return kind + binascii.b2a_base64(array.array(kind, values), newline=False).decode()
    return values


def read_columns(received: Any, kinds: Sequence[Any], count: int) -> list[Column]:
    """Return what another process has made by `columns`; ValueError or TypeError for what it cannot be.

    Args:
        kinds: For each column the type of a list of its values.
    """
    read: list[Column] = []
    for kind, (values, indices) in zip(kinds, received, strict=True):
        if type(values) is str and indices is None and values[:1] in _INTEGERS:
            text, values = values, array.array(values[0])
            values.frombytes(binascii.a2b_base64(text[1:], strict_mode=True))
        elif type(values) is not list:
            raise TypeError("no column")
        if indices is None and len(values) not in (1, count):
            raise TypeError("no column")
        if indices is not None:
            typed(list[int], indices)
            if len(indices) != count or min(indices) < 0 or max(indices) >= len(values):
                raise ValueError("no column")
        typed(kind, values)
        read.append((values, indices))
    return read


def differs(column: Column) -> bool:
    """Whether the processes have different values in a column of `columns`."""
    return len(column[0]) > 1


def spread(column: Column, count: int) -> list[Any]:
    """Return the values of a column of `columns`, by process number."""
    values, indices = column
    if indices is None:
        return list(values) * (count if len(values) == 1 else 1)
    return [values[number] for number in indices]
