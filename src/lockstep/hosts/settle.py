"""One outcome for all: what failed on one process fails on every process, before any of them enters a collective."""

from lockstep.errors import PeerError
from lockstep.hosts.channel import Channel

ERROR_CHARACTERS = 2000


def settle(channel: Channel, key: str, error: BaseException | None, timeout_s: float) -> None:
    """Return when no process has an error.

    Args:
        channel: this process's end of the service.
        key: the same on every process.
        error: what went wrong on this process, or None.
        timeout_s: seconds to wait for the others.

    Raises:
        PeerError: at least one process passed an error. The text is the same on every process; where it was this
            process's own error, it is the cause.
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    outcomes = channel.exchange(key, None if error is None else _text(error), timeout_s, _text_or_none)
    failed = [f"process {process}: {text}" for process, text in enumerate(outcomes) if text is not None]
    if failed:
        raise PeerError(f"{len(failed)} of {len(outcomes)} processes failed at {key!r}. {'; '.join(failed)}") from error


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 3] + "..."


def _text_or_none(value: object) -> str | None:
    assert value is None or isinstance(value, str)
    return value
