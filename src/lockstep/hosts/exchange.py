"""Exchanges between the processes of a job: values that must be equal, the leader's bytes, everybody's, failures.

Who waits longer than the channel's ``timeout_s`` raises HostTimeoutError, which names the missing processes and their
last phase; the key of a call is the same on every process.
"""

import collections
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lockstep.errors import DisagreementError, HostError, PeerError, is_fault
from lockstep.hosts._client import BarrierFailedError
from lockstep.hosts.channel import Channel, Column, columns, differs, read_columns, spread
from lockstep.json_text import typed
from lockstep.printable import error_text, get_logger, printable

log = get_logger(__name__)

MAY_DIFFER = " (may differ)"
"""The end of the name of a value that should be the same on every process: a difference is a warning, not an error."""
SHOWN_CHARACTERS = 80  # the longest value that an error shows in full
SHOWN_VALUES = 16  # the number of different values that an error shows
_DONE, _FAILED = b"+", b"-"


def digest(*parts: bytes | str) -> str:
    """SHA-256 of the parts, hex; where one part ends and the next begins counts too."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()


def agree(channel: Channel, key: str, values: Mapping[str, str], timeout_s: float, *, strict: bool = False) -> None:
    """Return when every process passed the same values.

    One digest is exchanged; the values only where digests differ.

    Args:
        values: The name of each thing to agree on, and its digest or a short text.
        strict: Whether values whose name ends in `MAY_DIFFER` must be equal too.

    Raises:
        DisagreementError: The values differ; the same text on every process says what differs and who has what.
    """
    if differs(_exchange_columns(channel, key, [digest_of(values)], timeout_s, [list[str]])[0]):
        raise_if_different(channel, key, values, timeout_s, strict=strict)


def raise_if_different(
    channel: Channel, key: str, values: Mapping[str, str], timeout_s: float, *, strict: bool = False
) -> None:
    """Exchange values of which a digest differs, and say what differs.

    Args:
        channel: This process's end of the service; the leader logs, once, a difference that is no error.

    Raises:
        DisagreementError: The values differ; the same text on every process says what differs and who has what.
    """
    # Beside the key, not below it: what is below it is deleted at this very barrier.
    described = channel.exchange(
        f"{key}, each", dict(values), timeout_s, _differences, functools.partial(typed, dict[str, str])
    )
    different = [name for name in described if strict or not name.endswith(MAY_DIFFER)]
    if not different:
        if channel.client.index == 0:
            _warn_once(channel, described.values())
        return
    texts = [described[name] for name in different]
    names = ", ".join(map(repr, different))
    raise DisagreementError(
        f"the processes of this job disagree at {shown(key)!r} on {names}. {' '.join(texts)} "
        "Every process must be started with the same command, configuration, files and library versions."
    )


def digest_of(values: Mapping[str, str]) -> str:
    """Return one digest of values to agree on, by name."""
    return digest(json.dumps(sorted(values.items())))


def broadcast(channel: Channel, key: str, value: bytes | None, timeout_s: float) -> bytes:
    """Return the leader's ``value`` on every process. The leader does not wait for the others.

    Args:
        value: Bytes on the leader, None elsewhere.

    Raises:
        HostError: The leader passed None, or another process a value.
    """
    leader = channel.client.index == 0
    if leader != (value is not None):
        passed = "None" if value is None else f"{len(value)} bytes"
        raise HostError(
            f"broadcast {key!r}: process {channel.client.index} passed {passed}. The leader (process 0) passes the "
            "bytes, every other process passes None."
        )
    if value is not None:
        channel.post(key, value)
        channel.delete_after_barrier(key)
        return value
    channel.heartbeat.wait_at(key)
    return channel.read(key, 0, timeout_s)


def broadcast_from_leader(channel: Channel, key: str, work: Callable[[], bytes], timeout_s: float) -> bytes:
    """Do ``work`` on the leader and return on every process what it returned.

    Raises:
        PeerError: The work failed; the text is the same on every process, and on the leader the error is the cause.
    """
    message, cause = None, None
    if channel.client.index == 0:
        try:
            message = _DONE + work()
        except Exception as error:
            message, cause = _FAILED + error_text(error).encode(), error
    message = broadcast(channel, key, message, timeout_s)
    if message.startswith(_FAILED):
        errors: list[str | None] = [None] * channel.client.count
        errors[0] = message[1:].decode(errors="replace")
        raise_if_any_failed(key, errors, cause)
    return message[1:]


def gather(channel: Channel, key: str, value: bytes, timeout_s: float) -> list[bytes] | None:
    """Return every process's ``value`` by process number on the leader, None elsewhere."""
    channel.post(key, value)
    channel.barrier(key, timeout_s)
    channel.delete_after_barrier(key)
    if channel.client.index != 0:
        return None
    # One read per process, not one of the directory: together the values may be too long for one message.
    return [channel.read(key, process, timeout_s) for process in range(channel.client.count)]


def all_min(channel: Channel, key: str, value: int, timeout_s: float) -> int:
    """Return on every process the smallest ``value`` that any of them passed."""
    whole = functools.partial(typed, int)
    return channel.exchange(key, value, timeout_s, lambda values: min(map(whole, values)), whole)


def reasons_to_stop(
    channel: Channel, key: str, number: int, error: Exception | None, reason: str | None, timeout_s: float
) -> set[str]:
    """Return when every process is here, and their reasons to stop: one barrier, and no keys, while there are none.

    A process with an error or a reason makes the barrier fail for all, and then all exchange what they have.

    Args:
        reason: Why this process wants all to stop, or None.

    Raises:
        PeerError: At least one process has an error.
    """
    own = [None if error is None else error_text(error), reason]
    if own == [None, None]:
        try:
            if channel.client.count > 1:
                channel.barrier(f"{key}/{number}", timeout_s, name=key)
            return set()
        except BarrierFailedError:
            pass
    elif channel.client.count > 1:
        channel.client.fail_barrier(key)
    exchanged = _exchange_columns(channel, f"{key}/{number}", own, timeout_s, [list[str | None]] * 2)
    failed, reasons = (spread(column, channel.client.count) for column in exchanged)
    raise_if_any_failed(key, failed, error)
    return {reason for reason in reasons if reason is not None}


def raise_if_any_failed(key: str, errors: Sequence[str | None], cause: BaseException | None) -> None:
    """Raise the same error on every process where at least one of them failed.

    Args:
        errors: The text of each process's error, None where it has none, by process number.

    Raises:
        PeerError: At least one process failed. Processes with the same error are named together.
    """
    if errors.count(None) == len(errors):
        return
    failed: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    for process, text in enumerate(errors):
        if text is not None:
            failed[printable(text)].append(process)
    fault = all(map(is_fault, failed))
    if len(errors) == 1:
        raise PeerError(f"{shown(key)} failed: {next(iter(failed))}", fault=fault) from cause
    texts = "; ".join(f"{name_processes(processes)}: {text}" for text, processes in failed.items())
    count = sum(map(len, failed.values()))
    text = f"{count} of {len(errors)} processes failed at {shown(key)!r}. {texts}"
    raise PeerError(text, len(errors), fault) from cause


def shown(key: str) -> str:
    """A key of the job as people read it: ``inference_eval#3/prepare``."""
    return key.removeprefix("lockstep/job/").removesuffix("#1")


def name_processes(processes: Iterable[int]) -> str:
    """Process numbers for reading: ``process 3``, ``processes 0-2, 5``."""
    numbers = sorted(processes)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(parts)}"


def _differences(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The differences, by name, and who has which value."""
    distinct = {id(mapping): mapping for mapping in values}.values()
    described = {}
    for name in dict.fromkeys(name for mapping in distinct for name in mapping):
        if len({typed(str, mapping[name]) if name in mapping else None for mapping in distinct}) > 1:
            described[name] = f"{printable(name)}: {who_has_what([mapping.get(name) for mapping in values])}."
    return described


def who_has_what(values: Sequence[str | None]) -> str:
    """The processes with each value, the most common value first and named where it is that of the majority."""
    groups: collections.defaultdict[str | None, list[int]] = collections.defaultdict(list)
    for process, value in enumerate(values):
        groups[value].append(process)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    texts = []
    for value, processes in ordered[:SHOWN_VALUES]:
        names = name_processes(processes)
        if 2 * len(processes) > len(values):
            names += " (the majority)"
        shown_value = "no such value" if value is None else _shorten(value)
        texts.append(f"{names}: {shown_value}")
    if len(ordered) > SHOWN_VALUES:
        texts.append(f"{len(ordered) - SHOWN_VALUES} more values")
    return "; ".join(texts)


def _shorten(value: str) -> str:
    return repr(value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "...")


def _warn_once(channel: Channel, texts: Iterable[str]) -> None:
    for text in texts:
        if text not in channel.warned:
            channel.warned.add(text)
            log.warning(
                "%s The compilers of these processes were given the same; most likely one of them found its result in "
                "a compilation cache and another compiled. With trainer.distributed.debug this is an error.",
                text,
            )


def _exchange_columns(channel: Channel, key: str, own: object, timeout_s: float, kinds: list[Any]) -> list[Column]:
    return channel.exchange(key, own, timeout_s, columns, lambda read: read_columns(read, kinds, channel.client.count))
