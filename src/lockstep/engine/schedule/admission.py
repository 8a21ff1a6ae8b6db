"""The choice of a replica for a waiting sequence, in a time that hardly grows with the number of replicas."""

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int

from lockstep.engine.schedule.batch import Capacity
from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sequence import Sequence


class Admission:
    """Free slots and pages of all replicas as arrays, which one sequence is compared with at once.

    Args:
        capacity: The capacities.
        replicas: The replicas that are given sequences.
    """

    def __init__(self, capacity: Capacity, replicas: Iterable[Replica]) -> None:
        self._page_size = capacity.page_size
        self._replicas = {replica.index: replica for replica in replicas}
        self._free_slots = np.zeros(capacity.replicas, np.int64)
        self._free_pages = np.zeros(capacity.replicas, np.int64)
        self._holders: dict[bytes, set[int]] = {}
        for replica in self._replicas.values():
            replica.holders = self._holders
            self.update(replica)

    def update(self, replica: Replica) -> None:
        """Notes the free slots and pages of a replica that changed."""
        self._free_slots[replica.index] = replica.num_free_slots
        self._free_pages[replica.index] = replica.allocator.num_free

    def choose(self, sequence: Sequence, *, crowded: bool) -> Replica | None:
        """Returns the replica with most free slots among those with room for the worst case, the first of equal ones.

        Args:
            sequence: A waiting sequence.
            crowded: Whether all slots will be taken anyway: the replica that has most of the prompt comes first then,
                so that a prompt is prefilled once and not once per replica.

        Returns:
            The replica; None where none has room.
        """
        need = sequence.worst_case_pages(self._page_size)
        room = np.where(self._free_pages >= need, self._free_slots, 0)
        for num_pages, holders in self._holders_of(sequence):
            fitting = np.where(self._free_pages[holders] >= need - num_pages, self._free_slots[holders], 0)
            best = int(fitting.argmax())
            if crowded and fitting[best]:
                return self._replicas[int(holders[best])]
            room[holders] = np.maximum(room[holders], fitting)
        best = int(room.argmax())
        return self._replicas[best] if room[best] else None

    def _holders_of(self, sequence: Sequence) -> Iterator[tuple[int, Int[np.ndarray, " replica"]]]:
        """The replicas that have part of a prompt, with its full pages there; those with the longest part first."""
        keys = sequence.prefix_keys
        parts = [(len(keys), sequence.tail_key), *((count, keys[count - 1]) for count in range(len(keys), 0, -1))]
        for num_pages, key in parts:
            if key is not None and (holders := self._holders.get(key)):
                yield num_pages, np.array(sorted(holders))
