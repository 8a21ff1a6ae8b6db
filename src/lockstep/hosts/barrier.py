"""Wait for every process."""

from lockstep.hosts.channel import Channel


def barrier(channel: Channel, key: str, timeout_s: float) -> None:
    """Return once every process has called it with this key.

    Raises:
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    channel.barrier(key, timeout_s)
