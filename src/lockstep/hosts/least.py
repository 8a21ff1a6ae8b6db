"""The smallest of a number that each process measured for itself."""

from lockstep.hosts.channel import Channel


def least(channel: Channel, key: str, value: int, timeout_s: float) -> int:
    """Return on every process the smallest ``value`` that any of them passed.

    Raises:
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    return min(channel.exchange(key, value, timeout_s, _number))


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
