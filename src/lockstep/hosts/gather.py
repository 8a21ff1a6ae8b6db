"""From every process to the leader."""

from lockstep.hosts.channel import Channel


def gather(channel: Channel, key: str, value: bytes, timeout_s: float) -> list[bytes] | None:
    """Return every process's ``value`` by process number on the leader, None elsewhere.

    Raises:
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    channel.post(key, value)
    channel.barrier(key, timeout_s)
    channel.spend(key)
    if channel.client.index != 0:
        return None
    # One read per process, not one of the directory: together the values may be too long for one message.
    return [channel.read(key, process, timeout_s) for process in range(channel.client.count)]
