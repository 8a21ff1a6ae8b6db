"""One replica's part of the schedule: its slots, its pages, its prefill queue."""

from collections import deque

import numpy as np
from jaxtyping import Int32

from lockstep.engine.schedule.batch import Capacity, CopyPagesBatch, PrefillBatch
from lockstep.engine.schedule.pages import NULL_PAGE, PageAllocator, PrefixTable
from lockstep.engine.schedule.sequence import Sequence


class Replica:
    """The slots and pages of one replica. The host owns both; the device only reads the numbers that it is given."""

    def __init__(self, index: int, capacity: Capacity) -> None:
        self.index = index
        self._shares_partial_pages = bool(capacity.page_copies)
        self._page_copies: list[tuple[Sequence, Sequence]] = []
        self._tails: dict[bytes, list[Sequence]] = {}
        self.allocator = PageAllocator(capacity.pages)
        self.slots: list[Sequence | None] = [None] * capacity.slots
        self.num_free_slots = capacity.slots
        """The number of slots without a sequence."""
        self._page_size = capacity.page_size
        self._most_prefilled = min(capacity.prefill_rows, capacity.prefill_sequences or capacity.prefill_rows)
        self.holders: dict[bytes, set[int]] = {}
        """The replicas that have the K/V of each key of full pages and of tails; shared by all replicas."""
        self.routed: dict[int, Int32[np.ndarray, "word token"]] = {}
        """The experts of the tokens of each page that prefill wrote, where programs report them."""
        self._prefixes = PrefixTable(self._hold, self._drop)
        self._queue: deque[Sequence] = deque()
        self._admitted: dict[Sequence, None] = {}  # in the order of admission

    @property
    def busy(self) -> bool:
        """Whether any slot has a sequence."""
        return self.num_free_slots < len(self.slots)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens wait for prefill."""
        return bool(self._queue)

    @property
    def fills_prefill(self) -> bool:
        """Whether enough sequences wait for prefill to fill the replica's rows of a launch, whatever their lengths."""
        return len(self._queue) >= self._most_prefilled

    @property
    def copying(self) -> bool:
        """Whether partial pages wait to be copied."""
        return bool(self._page_copies)

    def _hold(self, key: bytes) -> None:
        self.holders.setdefault(key, set()).add(self.index)

    def _drop(self, key: bytes) -> None:
        holders = self.holders[key]
        holders.remove(self.index)
        if not holders:
            del self.holders[key]

    def admit(self, sequence: Sequence) -> None:
        """Give ``sequence`` a slot and all pages that it can ever need; full pages that others have are shared.

        Pages are shared even before they are written: rows are launched in the order of admission, and within a launch
        the K/V of every row is written before any row reads. The partial page that a prompt ends with is never shared,
        because decode continues in it: a sequence with the same prompt gets a copy when all prefill is done
        (`take_page_copies`).
        """
        shared = self._prefixes.match(sequence.prefix_keys)
        for page in shared:
            self.allocator.share(page)
        own = self.allocator.allocate(sequence.worst_case_pages(self._page_size) - len(shared))
        for page in own:
            self.routed.pop(page, None)
        sequence.pages = shared + own
        for key, page in zip(sequence.prefix_keys, sequence.pages, strict=False):
            self._prefixes.add(key, page)
        sequence.num_prefilled = len(shared) * self._page_size
        if self._shares_partial_pages and sequence.tail_key is not None:
            same = self._tails.setdefault(sequence.tail_key, [])
            if not same:
                self._hold(sequence.tail_key)
            else:
                self._page_copies.append((same[0], sequence))
                sequence.num_prefilled = sequence.num_prefill
            same.append(sequence)
        sequence.replica = self.index
        sequence.slot = self.slots.index(None)
        self.slots[sequence.slot] = sequence
        self.num_free_slots -= 1
        self._admitted[sequence] = None
        if sequence.num_prefilled < sequence.num_prefill:
            self._queue.append(sequence)

    def take_prefill_rows(self, count: int, sequences: int = 0) -> list[tuple[Sequence, int]]:
        """Take up to ``count`` rows, pairs of a sequence and a start position, from the queue, oldest first.

        Args:
            sequences: The most sequences that the rows belong to; 0 for any number.
        """
        rows: list[tuple[Sequence, int]] = []
        taken = 0
        while self._queue and len(rows) < count and not 0 < sequences == taken:
            sequence, taken = self._queue[0], taken + 1
            starts = range(sequence.num_prefilled, sequence.num_prefill, self._page_size)[: count - len(rows)]
            rows += [(sequence, start) for start in starts]
            sequence.num_prefilled = min(starts[-1] + self._page_size, sequence.num_prefill)
            if sequence.num_prefilled == sequence.num_prefill:
                self._queue.popleft()
        return rows

    def take_page_copies(self) -> list[tuple[int, int]]:
        """Take all pairs of a page to copy and the page to copy it to; after all prefill and before decode."""
        assert not self._queue
        copies, self._page_copies = self._page_copies, []
        return [(a.pages[len(a.prefix_keys)], b.pages[len(b.prefix_keys)]) for a, b in copies]

    def commit_routed(self, batch: PrefillBatch | CopyPagesBatch, words: np.ndarray | None) -> None:
        """Take the experts of the pages of a launch that filled pages, or that copied them.

        Args:
            words: What a launch that filled pages reports, ``[replica, word, row, position]``.
        """
        if isinstance(batch, CopyPagesBatch):
            pairs = zip(batch.source[self.index].tolist(), batch.target[self.index].tolist(), strict=True)
            self.routed |= {target: self.routed[source] for source, target in pairs if target != NULL_PAGE}
        else:
            assert words is not None
            pages = batch.page[self.index].tolist()
            filled = {page: words[self.index, :, row].copy() for row, page in enumerate(pages) if page != NULL_PAGE}
            self.routed |= filled

    def release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of an ended sequence; its page numbers are no longer valid.

        Pages that it shares and has not prefilled are prefilled by the sequences that share them. Its partial page, if
        others wait for a copy, is prefilled by the first of these, and the rest copy from there.
        """
        del self._admitted[sequence]
        if self._queue or self._page_copies:
            self._leave_prefill(sequence)
        if sequence.tail_key is not None and (same := self._tails.get(sequence.tail_key)):
            same.remove(sequence)
            if not same:
                del self._tails[sequence.tail_key]
                self._drop(sequence.tail_key)
        prompt = sequence.pages[: -(-sequence.num_prefill // self._page_size)]
        if all(page in self.routed for page in prompt):
            sequence.routed_prompt = [self.routed[page] for page in prompt]
        self._prefixes.remove(self.allocator.release(sequence.pages))
        sequence.pages = []
        self.slots[sequence.slot] = None
        self.num_free_slots += 1

    def release_all(self) -> None:
        """Free all slots and pages."""
        for sequence in list(self._admitted):
            self.release(sequence)

    def _leave_prefill(self, leaving: Sequence) -> None:
        """Make others prefill and copy what ``leaving`` would have."""
        if leaving in self._queue:
            self._hand_over(leaving)
        targets = [target for source, target in self._page_copies if source is leaving]
        if targets:
            targets[0].num_prefilled = min(targets[0].num_prefilled, len(targets[0].prefix_keys) * self._page_size)
        self._page_copies = [
            (targets[0] if source is leaving else source, target)
            for source, target in self._page_copies
            if target is not leaving and target.num_prefilled == target.num_prefill
        ]
        self._queue = deque(each for each in self._admitted if each.num_prefilled < each.num_prefill)

    def _hand_over(self, leaving: Sequence) -> None:
        """Make other sequences prefill the shared pages that ``leaving`` will not write: each page once, in order."""
        orphans = set(leaving.pages[leaving.num_prefilled // self._page_size : len(leaving.prefix_keys)])
        for sequence in self._admitted:
            unwritten = [index for index, page in enumerate(sequence.pages) if page in orphans]
            if unwritten:
                # Shared pages are a prefix, so the sequence writes every page from its first unwritten one on.
                sequence.num_prefilled = min(sequence.num_prefilled, unwritten[0] * self._page_size)
                orphans.difference_update(sequence.pages)
