"""One replica's share of the schedule: its slots, its pages, its prefill queue."""

from collections import deque

from lockstep.schedule.pages import PageAllocator
from lockstep.schedule.plan import ScheduleSizes
from lockstep.schedule.prefix import PrefixTable
from lockstep.schedule.sequence import Sequence


class Replica:
    """The host owns slots and pages; the device only ever reads the numbers it is given.

    Args:
        index: the replica's number.
        sizes: capacities.
    """

    def __init__(self, index: int, sizes: ScheduleSizes) -> None:
        self.index = index
        self.allocator = PageAllocator(sizes.pages)
        self.slots: list[Sequence | None] = [None] * sizes.slots
        self._page_size = sizes.page_size
        self._prefixes = PrefixTable()
        self._queue: deque[Sequence] = deque()
        self._admitted: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether a slot is taken."""
        return any(sequence is not None for sequence in self.slots)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens wait for prefill."""
        return bool(self._queue)

    @property
    def num_free_slots(self) -> int:
        """Sequences that could still be admitted."""
        return self.slots.count(None)

    def fits(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` has a slot and pages for its worst case here."""
        if not self.num_free_slots:
            return False
        shared = self._prefixes.match(sequence.prefix_keys)
        return sequence.worst_case_pages(self._page_size) - len(shared) <= self.allocator.num_free

    def admit(self, sequence: Sequence) -> None:
        """Gives ``sequence`` a slot and all pages it can ever need; what others hold already is shared, not copied.

        Pages are shared before they are written: rows are launched in the order of admission, and within a launch every
        row's K/V is written before any row reads.
        """
        shared = self._prefixes.match(sequence.prefix_keys)
        for page in shared:
            self.allocator.share(page)
        own = self.allocator.allocate(sequence.worst_case_pages(self._page_size) - len(shared))
        sequence.pages = shared + own
        for key, page in zip(sequence.prefix_keys, sequence.pages, strict=False):
            self._prefixes.add(key, page)
        sequence.num_prefilled = len(shared) * self._page_size
        sequence.replica = self.index
        sequence.slot = self.slots.index(None)
        self.slots[sequence.slot] = sequence
        self._admitted.append(sequence)
        if sequence.num_prefilled < sequence.num_prefill:
            self._queue.append(sequence)

    def take_prefill_rows(self, count: int) -> list[tuple[Sequence, int]]:
        """Takes up to ``count`` (sequence, start position) from the queue, oldest first."""
        rows: list[tuple[Sequence, int]] = []
        while self._queue and len(rows) < count:
            sequence = self._queue[0]
            rows.append((sequence, sequence.num_prefilled))
            sequence.num_prefilled = min(sequence.num_prefilled + self._page_size, sequence.num_prefill)
            if sequence.num_prefilled == sequence.num_prefill:
                self._queue.popleft()
        return rows

    def release(self, sequence: Sequence) -> None:
        """Takes the slot and the pages of an ended sequence back; its page numbers are no longer valid.

        What it has not prefilled of pages that others share, they prefill themselves.
        """
        self._admitted.remove(sequence)
        if sequence in self._queue:
            self._queue.remove(sequence)
            self._hand_over(sequence)
        self._prefixes.remove(self.allocator.release(sequence.pages))
        sequence.pages = []
        self.slots[sequence.slot] = None

    def release_all(self) -> None:
        """Takes everything back."""
        self._queue.clear()
        for sequence in list(self._admitted):
            self.release(sequence)

    def _hand_over(self, leaving: Sequence) -> None:
        """Has the sharers of pages that ``leaving`` will not write write them: each page once, first come first."""
        orphans = set(leaving.pages[leaving.num_prefilled // self._page_size : len(leaving.prefix_keys)])
        for sequence in self._admitted:
            mine = [index for index, page in enumerate(sequence.pages) if page in orphans]
            if mine:
                # Shared pages are a beginning, so from the first one on all that follows is its own to write.
                sequence.num_prefilled = min(sequence.num_prefilled, mine[0] * self._page_size)
                orphans.difference_update(sequence.pages)
        self._queue = deque(each for each in self._admitted if each.num_prefilled < each.num_prefill)
