"""One outcome for all: what failed on one process fails on every process, before any of them enters a collective."""

from collections.abc import Callable
from typing import Any

from lockstep.errors import PeerError
from lockstep.hosts.broadcast import broadcast
from lockstep.hosts.channel import Channel

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


def from_leader(channel: Channel, key: str, work: Callable[[], bytes], timeout_s: float) -> bytes:
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
