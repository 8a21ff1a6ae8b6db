"""The replicas' part of the schedule: their slots, pages and prefill queues, and the batches that these make."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Bool, Int, Int32

from lockstep.engine.schedule.batch import Capacity, CopyPagesBatch, DecodeBatch, PrefillBatch, PromptLogprobsBatch
from lockstep.engine.schedule.pages import NULL_PAGE, PageAllocator, PrefixTable, page_keys
from lockstep.engine.schedule.sequence import DecodeResults, PromptLogprobs, Sequence
from lockstep.types import FinishReason


class Replica:
    """The slots and pages of one replica. The host owns both; the device only reads the numbers that it is given."""

    def __init__(self, index: int, capacity: Capacity, *, share_prefixes: bool = True) -> None:
        self.index, self._shares_prefixes = index, share_prefixes
        self._shares_partial_pages = bool(capacity.page_copies)
        self._page_copies: list[tuple[Sequence, Sequence]] = []
        self._tails: dict[bytes, list[Sequence]] = {}
        self.allocator = PageAllocator(capacity.pages)
        self.slots: list[Sequence | None] = [None] * capacity.slots
        self.num_free_slots = capacity.slots
        """The number of slots without a sequence."""
        self.num_prefilled = 0
        """The number of tokens whose K/V prefill has written so far."""
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
        num_own = sequence.worst_case_pages(self._page_size) - len(shared)
        self._prefixes.remove(self.allocator.make_room(num_own))
        own = self.allocator.allocate(num_own)
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
            self.num_prefilled += sequence.num_prefilled - starts[0]
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
        others wait for a copy, is prefilled by the first of these, and the rest copy from there. A turn of a
        conversation leaves its full pages to the next one.
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
        if sequence.conversation is not None and sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._keep(sequence, sequence.conversation)
        self._prefixes.remove(self.allocator.release(sequence.pages))
        sequence.pages = []
        self.slots[sequence.slot] = None
        self.num_free_slots += 1

    def _keep(self, sequence: Sequence, conversation: int) -> None:
        """Have a conversation keep the full pages of a complete turn: the K/V of all its tokens but the last, which
        decode had no need to read. Where pages are not shared, nothing outlives the turn.
        """
        if not self._shares_prefixes:
            sequence.num_cached = sequence.position
            return
        keys = page_keys((*sequence.request.prompt_tokens, *sequence.tokens[:-1]), self._page_size)
        for key, page in zip(keys, sequence.pages, strict=False):
            self._prefixes.add(key, page)
        pages = [page for page in self._prefixes.match(keys) if page in sequence.pages]
        self.allocator.keep(pages, conversation)
        sequence.num_cached = len(keys) * self._page_size
        if sequence.routed is not None and sequence.routed_prompt is not None:
            words = sequence.routed_words
            for index in range(len(sequence.prefix_keys), len(keys)):  # what prefill has not written whole
                place = slice(index * self._page_size, (index + 1) * self._page_size)
                self.routed[sequence.pages[index]] = words[:, place].copy()

    def forget(self, conversation: int) -> None:
        """Free the pages that a conversation alone keeps."""
        self._prefixes.remove(self.allocator.forget(conversation))

    def num_idle(self, keys: list[bytes]) -> int:
        """The number of pages with these keys, a prefix that is here, which conversations alone keep."""
        return sum(map(self.allocator.is_idle, self._prefixes.match(keys)))

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
        self._queue = deque(sequence for sequence in self._admitted if sequence.num_prefilled < sequence.num_prefill)

    def _hand_over(self, leaving: Sequence) -> None:
        """Make other sequences prefill the shared pages that ``leaving`` will not write: each page once, in order."""
        orphans = set(leaving.pages[leaving.num_prefilled // self._page_size : len(leaving.prefix_keys)])
        for sequence in self._admitted:
            unwritten = [index for index, page in enumerate(sequence.pages) if page in orphans]
            if unwritten:
                # Shared pages are a prefix, so the sequence writes every page from its first unwritten one on.
                sequence.num_prefilled = min(sequence.num_prefilled, unwritten[0] * self._page_size)
                orphans.difference_update(sequence.pages)


type PromptLogprobsRow = tuple[int, int, PromptLogprobs]
"""A replica, a row, and the record that the row's log-probabilities belong to."""


def prefill_batch(capacity: Capacity, replicas: Seq[Replica]) -> PrefillBatch:
    """Take the next pages of prompts from the replicas' queues."""
    batch = PrefillBatch.empty(capacity)
    for replica in replicas:
        r = replica.index
        rows = replica.take_prefill_rows(capacity.prefill_rows, capacity.prefill_sequences)
        for row, (sequence, start) in enumerate(rows):
            end = min(start + capacity.page_size, sequence.num_prefill)
            # No query sees what follows the prompt on its last page, but 0 times NaN is NaN: it repeats a token that
            # the row's queries see anyway.
            batch.tokens[r, row] = sequence.request.prompt_tokens[start]
            batch.tokens[r, row, : end - start] = sequence.request.prompt_tokens[start:end]
            batch.start[r, row], batch.slot[r, row], batch.count[r, row] = start, sequence.slot, end - start
            batch.page[r, row] = sequence.pages[start // capacity.page_size]
            batch.page_table[r, row, : len(sequence.pages)] = sequence.pages
    return batch


def copy_pages_batch(capacity: Capacity, replicas: Seq[Replica]) -> CopyPagesBatch:
    """Take every partial page that waits to be copied."""
    batch = CopyPagesBatch.empty(capacity)
    for replica in replicas:
        for at, (source, target) in enumerate(replica.take_page_copies()):
            batch.source[replica.index, at], batch.target[replica.index, at] = source, target
    return batch


def prompt_logprobs_batch(
    capacity: Capacity, replicas: Seq[Replica]
) -> tuple[PromptLogprobsBatch, list[PromptLogprobsRow]]:
    """Build rows of prompts whose K/V is complete and whose log-probabilities are requested and missing.

    Any generation of a prompt has its K/V; the first is taken.

    Returns:
        The batch, and what each of its used rows is for; no rows where nothing is missing.
    """
    batch, rows, begun = PromptLogprobsBatch.empty(capacity), list[PromptLogprobsRow](), set[PromptLogprobs]()
    for replica in replicas:
        r, row = replica.index, 0
        for sequence in replica.slots:
            record = None if sequence is None else sequence.prompt_logprobs
            if sequence is None or record is None or record.done or record in begun:
                continue
            begun.add(record)
            prompt = sequence.request.prompt_tokens
            for start in range(len(record.logprobs), len(prompt) - 1, capacity.page_size):
                if row == capacity.prefill_rows:
                    break
                end = min(start + capacity.page_size, len(prompt) - 1)
                tokens, targets = prompt[start:end], prompt[start + 1 : end + 1]
                batch.tokens[r, row] = tokens[0]
                batch.tokens[r, row, : len(tokens)] = tokens
                batch.targets[r, row, : len(targets)] = targets
                batch.start[r, row] = start
                batch.page_table[r, row, : len(sequence.pages)] = sequence.pages
                rows.append((r, row, record))
                row += 1
    return batch, rows


type Slot = tuple[int, int] | tuple[np.ndarray, np.ndarray]
"""A replica and a slot, or as many replicas and slots."""


class DecodeSlots:
    """The next decode batch. A sequence is written with all others that got a slot since the last launch, and then
    moves on with each launch.
    """

    def __init__(self, capacity: Capacity) -> None:
        single = dataclasses.replace(capacity, replicas=1, idle_replicas=0, slots=1, sequences=1)
        self._next = DecodeBatch.empty(capacity, 0)
        self._new: list[Sequence] = []
        self._idle = DecodeBatch.empty(single, 0)
        self._has_stop_tokens = np.zeros(self._next.token.shape, bool)
        self.has_stop_strings = np.zeros(self._next.token.shape, bool)
        """Whether the sequence in each slot has stop strings; as of the last `batch`."""
        self.sequences = np.full(self._next.token.shape, None, object)
        """The sequence in each slot, or None; as of the last `batch`."""

    @property
    def remaining(self) -> Int[np.ndarray, " sequence"]:
        """The number of tokens that each sequence in a slot may still sample."""
        left = self.all_remaining
        return left[left > 0]

    @property
    def all_remaining(self) -> Int32[np.ndarray, "replica slot"]:
        """The number of tokens that the sequence in each slot may still sample; 0 in idle slots."""
        self._write_new()
        return self._next.remaining

    @property
    def may_stop(self) -> bool:
        """Whether a sequence in a slot may end before its last token."""
        self._write_new()
        return bool((self._has_stop_tokens | self.has_stop_strings).any())

    def put(self, sequence: Sequence) -> None:
        """Take a sequence that was given its slot and its pages."""
        self._new.append(sequence)

    def _write_new(self) -> None:
        """Write the sequences that came since the last call."""
        new, self._new = self._new, []
        if not new:
            return
        batch, params = self._next, [sequence.request.params for sequence in new]
        at = np.array([sequence.replica for sequence in new]), np.array([sequence.slot for sequence in new])
        batch.token[at] = [sequence.last_token for sequence in new]
        batch.position[at] = [sequence.position for sequence in new]
        batch.remaining[at] = [sequence.remaining for sequence in new]
        pages, stops = [sequence.pages for sequence in new], [rules.stops for rules in params]
        for array, lists, padding in ((batch.page_table, pages, NULL_PAGE), (batch.stop_ids, stops, -1)):
            columns = np.array([*itertools.zip_longest(*lists, fillvalue=padding)], np.int32)
            array[*at, : len(columns)] = columns.T
        batch.draw[at] = [
            (sequence.request.params.seed, sequence.request.prompt_id, sequence.generation_id) for sequence in new
        ]
        batch.temperature[at] = [rules.temperature for rules in params]
        if batch.sampling.arrays():
            for sequence in new:
                batch.sampling.set((sequence.replica, sequence.slot), sequence)
        self._has_stop_tokens[at] = [bool(stop_ids) for stop_ids in stops]
        self.has_stop_strings[at] = [bool(rules.stop) for rules in params]
        self.sequences[at] = new

    def clear(self, at: Slot) -> None:
        """Make slots idle."""
        self._write_new()
        for array, idle in zip(self._next.arrays().values(), self._idle.arrays().values(), strict=True):
            array[at] = idle[0, 0]
        self._has_stop_tokens[at] = self.has_stop_strings[at] = False
        self.sequences[at] = None

    def advance(
        self, results: DecodeResults
    ) -> tuple[Int[np.ndarray, "replica slot"], Bool[np.ndarray, "replica slot"]]:
        """Move every sequence on by what it sampled.

        Returns:
            The number of tokens that each slot sampled, and whether the last of them is a stop token of the sequence.
        """
        self._write_new()
        batch, tokens = self._next, results.tokens
        counts = (tokens >= 0).sum(axis=-1, dtype=np.int32)
        last = np.take_along_axis(tokens, np.maximum(counts - 1, 0)[..., None], axis=-1)[..., 0]
        batch.sampling.extend_history(batch.position + 1, tokens)
        np.copyto(batch.token, last, where=counts > 0)
        np.add(batch.position, counts, out=batch.position)
        np.subtract(batch.remaining, counts, out=batch.remaining)
        return counts, (counts > 0) & (last[..., None] == batch.stop_ids).any(axis=-1)

    def batch(self, num_steps: int) -> DecodeBatch:
        """Return the arrays of a launch of ``num_steps``, which later changes leave as they are."""
        self._write_new()
        return self._next.copy(num_steps)
