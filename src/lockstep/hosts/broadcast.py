"""From the leader to every process."""

from lockstep.errors import HostError
from lockstep.hosts.channel import Channel


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
        channel.spend(key)
        return value
    channel.heart.wait_at(key)
    return channel.read(key, 0, timeout_s)
