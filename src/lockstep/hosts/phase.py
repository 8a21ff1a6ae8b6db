"""Phases that fail on all processes where they fail on one, and the ledger of launches, which must agree."""

import array
import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lockstep.errors import LaunchMismatchError
from lockstep.hosts.channel import Channel, Column, columns, differs, read_columns, spread
from lockstep.hosts.exchange import (
    SHOWN_VALUES,
    digest_of,
    name_processes,
    raise_if_any_failed,
    raise_if_different,
)
from lockstep.json_text import typed
from lockstep.printable import error_text, printable

REMEMBERED = 4096  # launches whose names a process keeps; older ones are in the hash alone
SENT = 64  # launches whose names are exchanged where processes have launched different programs
SHOWN_DIGITS = 12


class Ledger:
    """The launches of the library's programs, in order, as names and as one rolling hash that hosts compare."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256().hexdigest()
        self._launches: collections.deque[tuple[str, str]] = collections.deque(maxlen=REMEMBERED)
        self._hashes: collections.deque[tuple[int, str]] = collections.deque(maxlen=REMEMBERED // SENT)
        self.count = 0  # launches so far
        self.before_launch: Callable[[], None] | None = None
        """Called after each entry and before its launch, in debug mode; what it raises prevents the launch."""

    def record(self, name: str, digest: str) -> None:
        """Adds a launch, before it is made, so that one that never returns is on record.

        Raises:
            LaunchMismatchError: In debug mode, another process is about to launch something else.
        """
        self._hash = hashlib.sha256(f"{self._hash} {name} {digest}".encode()).hexdigest()
        self._launches.append((name, digest[:SHOWN_DIGITS]))
        self.count += 1
        if self.count % SENT == 0:
            self._hashes.append((self.count, self._hash[:SHOWN_DIGITS]))
        if self.before_launch is not None:
            self.before_launch()

    @property
    def launches(self) -> list[str]:
        """The names of the last launches, oldest first; all of them up to `REMEMBERED`."""
        return [name for name, _ in self._launches]

    @property
    def state(self) -> str:
        """Number and rolling hash of all launches: equal where the same was launched in the same order."""
        return f"{self.count} {self._hash}"

    @property
    def hashes(self) -> list[tuple[int, str]]:
        """The number of launches and the start of their hash, after every `SENT` launches, oldest first."""
        return list(self._hashes)

    def last(self, number: int = REMEMBERED) -> list[tuple[int, str, str]]:
        """Index (from 0), name and short digest of up to ``number`` last launches, oldest first."""
        first = self.count - len(self._launches)
        entries = [(first + i, name, digest) for i, (name, digest) in enumerate(self._launches)]
        return entries[-number:]

    def __str__(self) -> str:
        return f"{self.count} launches, {self._hash}"


def raise_different_launches(channel: Channel, key: str, ledger: Ledger, timeout_s: float) -> NoReturn:
    """Find the first launch that differs: by hashes first, then among `SENT` launches of each process.

    Raises:
        LaunchMismatchError: On every process, with the same text: the first launch that differs, and who made which.
    """
    # Beside the key, not below it: the leader deletes what is below the key at this very barrier.
    start = channel.exchange(f"{key}, hashes", ledger.hashes, timeout_s, _last_equal, functools.partial(typed, int))
    entries = [entry for entry in ledger.last() if start <= entry[0] < start + SENT]
    describe = functools.partial(_describe, key)
    text = channel.exchange(f"{key}, each", entries, timeout_s, describe, functools.partial(typed, str))
    error = LaunchMismatchError(text)
    error.on_every_process = True
    raise error


def _last_equal(hashes: Sequence[object]) -> int:
    """The number of launches that are the same on all, as far as hashes tell; at least those before the oldest hash."""
    by_process = [dict(typed(list[tuple[int, str]], hashes_of_process)) for hashes_of_process in hashes]
    first = max(min(hashes_of_process, default=SENT) for hashes_of_process in by_process) - SENT
    while (
        len({hashes_of_process.get(first + SENT) for hashes_of_process in by_process}) == 1
        and first + SENT in by_process[0]
    ):
        first += SENT
    return first


def _describe(key: str, entries: Sequence[object]) -> str:
    read = [typed(list[tuple[int, str, str]], launches) for launches in entries]
    by_process = [
        {index: (printable(name), printable(digest)) for index, name, digest in launches} for launches in read
    ]
    first = max(min(launches, default=0) for launches in by_process)
    text = f"the processes of this job launched different device programs, found at {key!r}. "
    for index in sorted({index for launches in by_process for index in launches if index >= first}):
        made: collections.defaultdict[tuple[str, str] | None, list[int]] = collections.defaultdict(list)
        for process, launches in enumerate(by_process):
            made[launches.get(index)].append(process)
        if len(made) > 1:
            parts = [
                f"{_launch(launch)} on {name_processes(processes)}"
                for launch, processes in sorted(made.items(), key=lambda m: m[1])
            ]
            text += f"Launch {index} was {'; '.join(parts[:SHOWN_VALUES])}. "
            break
    else:
        text += f"They differ before launch {first}, which is no longer remembered. "
    return text + (
        "On a pod such a job hangs or dies. Look for a call that only some processes make (a branch on the process "
        "number, a tracker or metric that uses jax); debug: true finds it before the launch."
    )


def _launch(launch: tuple[str, str] | None) -> str:
    return "nothing" if launch is None else f"{launch[0]!r} ({launch[1]})"


class Phase:
    """One process's part of `Hosts.run_on_all` or `Hosts.launch_on_all`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._agreed: dict[str, str] = {}
        self._own: Any = None
        self._shared: list[Any] | None = None

    def agree(self, values: Mapping[str, str]) -> None:
        """Add values that every process must have, such as digests; compared when the phase ends."""
        self._agreed |= values

    def share(self, value: object) -> None:
        """Give the other processes a short JSON value of this one, of the same kind on every process that has one."""
        self._own = value

    @property
    def shared(self) -> list[Any]:
        """The values that the processes shared, by process number; None of those that shared none."""
        assert self._shared is not None, f"{self.name}: what the others share is known when the phase has ended"
        return self._shared

    def end(
        self,
        channel: Channel,
        key: str,
        error: BaseException | None,
        ledger: Ledger | None,
        timeout_s: float,
        *,
        strict: bool = False,
    ) -> None:
        """Exchange outcome, shared value, digests of what must agree and of the launches, all at once."""
        failed = None if error is None else error_text(error)
        state = None if ledger is None else ledger.state
        # What a failed process has gathered so far says nothing.
        own = [failed, self._own, digest_of(self._agreed), state] if error is None else [failed, None, "", state]
        errors, shared, digests, states = channel.exchange(
            key, own, timeout_s, columns, lambda received: _outcomes(received, own, channel.client.count)
        )
        raise_if_any_failed(key, spread(errors, channel.client.count), error)
        if ledger is not None and differs(states):
            raise_different_launches(channel, key, ledger, timeout_s)
        if differs(digests):
            raise_if_different(channel, key, self._agreed, timeout_s, strict=strict)
        self._shared = spread(shared, channel.client.count)


def _outcomes(received: object, own: list[Any], count: int) -> list[Column]:
    texts = list[str | None]
    read = read_columns(received, [texts, Any, list[str], texts], count)
    errors, shared, _, states = (values for values, _ in read)
    if any((state is None) != (own[3] is None) for state in states):
        raise TypeError("no state of launches")
    if errors == [None] and not _are_like(shared, own[1]):
        raise TypeError("shared is something of another kind")
    return read


def _are_like(values: Sequence[Any], own: Any) -> bool:
    """Whether processes may have shared these where this one has shared its own: a tuple has one length on all."""
    if own is None or (isinstance(values, array.array) and isinstance(own, int | float)):
        return True
    if isinstance(own, int | float):
        with contextlib.suppress(TypeError, OverflowError):
            return bool(array.array("q", values))  # at once: there may be a thousand
    kinds = set(map(type, values))
    if isinstance(own, int | float):
        return kinds <= {bool, int, float} and all(-(2**63) <= value < 2**63 for value in values)
    if isinstance(own, Mapping):
        return kinds <= {dict}
    if isinstance(own, tuple):
        lengths = {len(value) for value in values} if kinds <= {list, tuple} else {-1}
        return lengths <= {len(own)} and all(map(_are_like, zip(*values, strict=True), own))
    if isinstance(own, list):
        return kinds <= {list} and (not own or all(_are_like(value, own[0]) for value in values))
    return kinds <= {str, type(None)}
