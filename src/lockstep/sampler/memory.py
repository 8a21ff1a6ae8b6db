"""What the devices of a job hold, at named moments."""

import json

from lockstep.engine.free_memory import peak_bytes, used_bytes
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
        self._add(moment, used_bytes())

    def note_peak(self) -> None:
        """Take down the most that a device of this host has ever held."""
        self._add("peak", peak_bytes())

    def of_all(self, name: str) -> dict[str, int]:
        """By moment, the most of any host; complete on the leader, empty elsewhere. Every host calls it alike."""
        posts = self._hosts.gather(name, json.dumps(self._mine).encode())
        found: dict[str, int] = {}
        for post in posts or ():
            for moment, used in json.loads(post).items():
                found[moment] = max(used, found.get(moment, 0))
        return found

    def _add(self, moment: str, held: int | None) -> None:
        if held is not None:
            self._mine[moment] = held
