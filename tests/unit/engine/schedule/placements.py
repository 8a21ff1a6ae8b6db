"""The rule of admission for one replica at a time, as the oracle of the arrays that the scheduler compares at once."""

from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sequence import Sequence


def num_shared_tokens(replica: Replica, sequence: Sequence) -> int:
    """The number of tokens of a sequence that need no prefill on a replica, because other sequences have them."""
    if sequence.tail_key is not None and sequence.tail_key in replica._tails:
        return sequence.num_prefill
    return len(replica._prefixes.match(sequence.prefix_keys)) * replica._page_size


def fits(replica: Replica, sequence: Sequence) -> bool:
    """Whether a sequence has a slot and pages for its worst case on a replica."""
    missing = sequence.worst_case_pages(replica._page_size) - replica.allocator.num_free
    return bool(replica.num_free_slots) and missing <= len(replica._prefixes.match(sequence.prefix_keys))


def choose(replicas: list[Replica], sequence: Sequence, crowded: bool) -> Replica | None:
    """The replica that a sequence goes to; None where none has room."""

    def priority(replica: Replica) -> tuple[int, int]:
        return num_shared_tokens(replica, sequence) if crowded else 0, replica.num_free_slots

    return max((each for each in replicas if fits(each, sequence)), key=priority, default=None)
