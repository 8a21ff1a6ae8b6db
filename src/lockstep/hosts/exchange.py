"""What processes tell each other: values that all must hold, the leader's, everybody's, and whether anything failed."""

import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import DisagreementError, HostError, PeerError
from lockstep.hosts.channel import Channel

SHOWN_CHARACTERS = 80


def digest(*parts: bytes | str) -> str:
    """SHA-256 of the parts, hex; where one part ends and the next begins counts too."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()


def agree(channel: Channel, key: str, values: Mapping[str, str], timeout_s: float) -> None:
    """Return when every process passed the same values.

    Args:
        channel: this process's end of the service.
        key: the same on every process.
        values: for each thing to agree on, its name and its digest (or a short text).
        timeout_s: seconds to wait for the others.

    Raises:
        DisagreementError: on every process, with the same text: what differs, and who holds what.
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    compare(key, channel.exchange(key, dict(values), timeout_s, _mapping))


def compare(key: str, held: Sequence[Mapping[str, str]]) -> None:
    """Return when every process holds the same values: `agree`, where all of them are known already.

    Args:
        key: named in the error.
        held: the values of each process, by process number.

    Raises:
        DisagreementError: what differs, and who holds what.
    """
    names = list(dict.fromkeys(name for one in held for name in one))
    different = [name for name in names if len({one.get(name) for one in held}) > 1]
    if different:
        texts = [_describe(name, [one.get(name) for one in held]) for name in different]
        raise DisagreementError(
            f"the processes of this job disagree at {key!r} on {', '.join(map(repr, different))}. {' '.join(texts)} "
            "Every process must be started with the same command, configuration, files and library versions."
        )


def _describe(name: str, values: Sequence[str | None]) -> str:
    """Who holds which value, the most common value first and named as the majority where it is one."""
    groups: collections.defaultdict[str | None, list[int]] = collections.defaultdict(list)
    for process, value in enumerate(values):
        groups[value].append(process)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    texts = []
    for value, processes in ordered:
        who = f"{'process' if len(processes) == 1 else 'processes'} {', '.join(map(str, processes))}"
        if 2 * len(processes) > len(values):
            who += " (the majority)"
        what = "no such value" if value is None else _shorten(value)
        texts.append(f"{who}: {what}")
    return f"{name}: {'; '.join(texts)}."


def _shorten(value: str) -> str:
    return repr(value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "...")


def _mapping(value: object) -> dict[str, str]:
    assert isinstance(value, dict)
    return value


def broadcast(channel: Channel, key: str, value: bytes | None, timeout_s: float) -> bytes:
    """Return the leader's ``value`` on every process. The leader does not wait for the others.

    Args:
        channel: this process's end of the service.
        key: the same on every process.
        value: bytes on the leader, None elsewhere.
        timeout_s: seconds to wait for the leader.

    Raises:
        HostError: the leader passed None, or another process a value.
        HostTimeoutError: the leader posted nothing within ``timeout_s``.
    """
    leader = channel.client.index == 0
    if leader != (value is not None):
        given = "None" if value is None else f"{len(value)} bytes"
        raise HostError(
            f"broadcast {key!r}: process {channel.client.index} passed {given}. The leader (process 0) passes the "
            "bytes, every other process passes None."
        )
    if value is not None:
        channel.post(key, value)
        channel.delete_after_barrier(key)
        return value
    channel.heartbeat.wait_at(key)
    return channel.read(key, 0, timeout_s)


def gather(channel: Channel, key: str, value: bytes, timeout_s: float) -> list[bytes] | None:
    """Return every process's ``value`` by process number on the leader, None elsewhere.

    Raises:
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    channel.post(key, value)
    channel.barrier(key, timeout_s)
    channel.delete_after_barrier(key)
    if channel.client.index != 0:
        return None
    # One read per process, not one of the directory: together the values may be too long for one message.
    return [channel.read(key, process, timeout_s) for process in range(channel.client.count)]


def least(channel: Channel, key: str, value: int, timeout_s: float) -> int:
    """Return on every process the smallest ``value`` that any of them passed.

    Raises:
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    return min(channel.exchange(key, value, timeout_s, _number))


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


ERROR_CHARACTERS = 2000
_DONE, _FAILED = b"+", b"-"


def settle(
    channel: Channel, key: str, error: BaseException | None, timeout_s: float, value: object = None
) -> list[Any]:
    """Return when no process has an error.

    Args:
        channel: this process's end of the service.
        key: the same on every process.
        error: what went wrong on this process, or None.
        timeout_s: seconds to wait for the others.
        value: what this process has to tell, as short JSON.

    Returns:
        The values of all processes, by process number.

    Raises:
        PeerError: at least one process passed an error. The text is the same on every process; where it was this
            process's own error, it is the cause.
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    outcome = [None, value] if error is None else [_text(error), None]
    outcomes = channel.exchange(key, outcome, timeout_s, _pair)
    failed = [f"process {process}: {text}" for process, (text, _) in enumerate(outcomes) if text is not None]
    if failed:
        raise PeerError(f"{len(failed)} of {len(outcomes)} processes failed at {key!r}. {'; '.join(failed)}") from error
    return [told for _, told in outcomes]


def broadcast_from_leader(channel: Channel, key: str, work: Callable[[], bytes], timeout_s: float) -> bytes:
    """Do ``work`` on the leader and return on every process what it returned.

    Args:
        channel: this process's end of the service.
        key: the same on every process.
        work: called on the leader alone.
        timeout_s: seconds to wait for the leader.

    Raises:
        PeerError: it failed; the text is the same on every process, and on the leader the error is the cause.
        HostTimeoutError: the leader posted nothing within ``timeout_s``.
    """
    word, cause = None, None
    if channel.client.index == 0:
        try:
            word = _DONE + work()
        except Exception as error:
            word, cause = _FAILED + _text(error).encode(), error
    word = broadcast(channel, key, word, timeout_s)
    if word.startswith(_FAILED):
        raise PeerError(
            f"1 of {channel.client.count} processes failed at {key!r}. process 0: {word[1:].decode()}"
        ) from cause
    return word[1:]


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 3] + "..."


def _pair(value: object) -> list[Any]:
    assert isinstance(value, list) and len(value) == 2
    return value
