"""What the devices of a job hold, at named moments."""

import json

import jax

from lockstep.hosts import Hosts


class MemoryLog:
    """Bytes on the fullest device of all hosts at named moments; empty where the backend does not count (CPU).

    Args:
        hosts: of the job.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._mine: dict[str, int] = {}

    def note(self, moment: str) -> None:
        """Take down what this host's fullest device holds now."""
        used = [stats["bytes_in_use"] for stats in _stats() if "bytes_in_use" in stats]
        if used:
            self._mine[moment] = max(used)

    def note_peak(self) -> None:
        """Take down the most that a device of this host has ever held."""
        peaks = [stats["peak_bytes_in_use"] for stats in _stats() if "peak_bytes_in_use" in stats]
        if peaks:
            self._mine["peak"] = max(peaks)

    def of_all(self, name: str) -> dict[str, int]:
        """By moment, the most of any host; complete on the leader, empty elsewhere. Every host calls it alike."""
        posts = self._hosts.gather(name, json.dumps(self._mine).encode())
        found: dict[str, int] = {}
        for post in posts or ():
            for moment, used in json.loads(post).items():
                found[moment] = max(used, found.get(moment, 0))
        return found


def _stats() -> list[dict[str, int]]:
    return [device.memory_stats() or {} for device in jax.local_devices()]
