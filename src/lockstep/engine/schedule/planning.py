"""The replica of a waiting sequence, the batches of the next launch, and requests that can never be in one."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Int

from lockstep.engine.schedule.batch import Capacity, CopyPagesBatch, PrefillBatch, PromptLogprobsBatch
from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sampling import sampling_sizes
from lockstep.engine.schedule.sequence import PromptLogprobs, Sequence
from lockstep.errors import CapacityError
from lockstep.types import Request

_LAUNCH_COST = 4
"""The cost of a launch besides its steps, in steps: the host's work, gathering the context, the prefill of admitted
sequences. It is a guess: with true costs of 0.5 to 6, `num_decode_steps` comes within 5 % of the best fixed least
length at 8 to 256 slots, whether answers stop early or not; that is another one each time (benchmarks/admission.py).
"""


def num_decode_steps(remaining: Int[np.ndarray, " sequence"], limit: int, *, waiting: bool, stop_rate: float) -> int:
    """Return the number of steps of a launch; a pure function, so that every host computes the same.

    While no sequence waits, a launch is as long as its longest sequence. While sequences wait, a long launch leaves
    slots idle whose sequences have ended, and a short launch pays the cost of a launch again: of all lengths the one is
    chosen that is expected to sample the most tokens per step of cost; of equal ones the longest.

    Args:
        remaining: The number of tokens that each active sequence may still sample, each at least 1.
        waiting: Whether other sequences wait for a slot or pages.
        stop_rate: The part of the tokens that end their sequence before its last, as far as is known; 0 where none can.
    """
    longest = min(limit, int(remaining.max()))
    if not waiting:
        return longest
    # Nothing but additions, multiplications and divisions one after the other, which are exact to the last bit on every
    # CPU: another number of steps on one host would hang all of them.
    ended = np.bincount(np.minimum(remaining, longest), minlength=longest + 1)
    left = len(remaining) - np.cumsum(ended)[:longest]  # sequences with a token left at each step
    surviving = np.cumprod(np.full(longest, 1.0 - stop_rate)) if stop_rate else 1.0
    rates = np.cumsum(left * surviving) / (np.arange(1, longest + 1) + _LAUNCH_COST)
    return longest - int(np.argmax(rates[::-1]))


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


class Admission:
    """Free slots and pages of all replicas as arrays, which one sequence is compared with at once."""

    def __init__(self, capacity: Capacity, replicas: Iterable[Replica]) -> None:
        self._page_size = capacity.page_size
        self._replicas = {replica.index: replica for replica in replicas}
        self._free_slots = np.zeros(capacity.replicas, np.int64)
        self._free_pages = np.zeros(capacity.replicas, np.int64)
        self._idle_pages = np.zeros(capacity.replicas, np.int64)
        self._holders: dict[bytes, set[int]] = {}
        for replica in self._replicas.values():
            replica.holders = self._holders
            self.update(replica)

    def update(self, replica: Replica) -> None:
        """Note the free slots and pages of a replica that changed."""
        self._free_slots[replica.index] = replica.num_free_slots
        self._free_pages[replica.index] = replica.allocator.num_free
        self._idle_pages[replica.index] = replica.allocator.num_idle

    def choose(self, sequence: Sequence, *, crowded: bool) -> Replica | None:
        """Return the replica with most free slots among those with room for the worst case, the first of equal ones.

        Args:
            crowded: Whether all slots will be taken anyway, or the K/V of a conversation was kept: the replica that has
                most of the prompt comes first then, so that a prompt is prefilled once and not once per replica.

        Returns:
            The replica; None where none has room.
        """
        need = sequence.worst_case_pages(self._page_size)
        room = np.where(self._free_pages >= need, self._free_slots, 0)
        for num_pages, holders in self._holders_of(sequence):
            missing = need - num_pages + self._num_idle(holders, sequence.prefix_keys[:num_pages])
            fitting = np.where(self._free_pages[holders] >= missing, self._free_slots[holders], 0)
            best = int(fitting.argmax())
            if crowded and fitting[best]:
                return self._replicas[int(holders[best])]
            room[holders] = np.maximum(room[holders], fitting)
        best = int(room.argmax())
        return self._replicas[best] if room[best] else None

    def _num_idle(self, holders: Int[np.ndarray, " replica"], keys: list[bytes]) -> Int[np.ndarray, " replica"]:
        """The number of pages with these keys that conversations alone keep: they count as free on their replica."""
        if not self._idle_pages.any():
            return np.zeros(len(holders), np.int64)
        return np.array([self._replicas[int(holder)].num_idle(keys) for holder in holders])

    def _holders_of(self, sequence: Sequence) -> Iterator[tuple[int, Int[np.ndarray, " replica"]]]:
        """The replicas that have part of a prompt, with its full pages there; those with the longest part first."""
        keys = sequence.prefix_keys
        parts = [(len(keys), sequence.tail_key), *((count, keys[count - 1]) for count in range(len(keys), 0, -1))]
        for num_pages, key in parts:
            if key is not None and (holders := self._holders.get(key)):
                yield num_pages, np.array(sorted(holders))


def check_length(request: Request, limit: int, largest: int | None = None) -> None:
    """Refuse a request that is longer than a sequence may be.

    Args:
        limit: The ``max_seq_len`` in use, in tokens of prompt and answer together.
        largest: The largest value that ``max_seq_len`` could be raised to; None if there is no bound.

    Raises:
        CapacityError: The request is too long; the message has the lengths, the limit and the changes that would help.
    """
    prompt, new = len(request.prompt_tokens), request.params.max_new_tokens
    if prompt + new <= limit:
        return
    ways = []
    if limit > new:
        ways.append(f"shorten the prompt to at most {limit - new} tokens")
    if limit > prompt:
        ways.append(f"lower max_new_tokens to at most {limit - prompt}")
    if largest is None or prompt + new <= largest:
        ways.append(f"raise max_seq_len to at least {prompt + new}")
    if not ways:
        ways.append("shorten the prompt and lower max_new_tokens")
    bound = f"max_seq_len is {limit}" + ("" if largest is None else f" (the model allows {largest})")
    if limit == largest:  # which may be nothing that a user has set
        bound = f"the model allows {largest}"
    fix = ", or ".join(ways)
    raise CapacityError(
        f"prompt {request.prompt_id} has {prompt} tokens and max_new_tokens is {new}, {prompt + new} together; "
        f"{bound}. {fix[0].upper()}{fix[1:]}."
    )


def check_capacity(capacity: Capacity, requests: Seq[Request]) -> None:
    """Refuse requests that can never fit, whatever finishes before them.

    Raises:
        CapacityError: A request does not fit; the message has the prompt, its need, the limit and the fix.
    """
    for request in requests:
        check_length(request, capacity.pages_per_sequence * capacity.page_size)
        prompt, new = len(request.prompt_tokens), request.params.max_new_tokens
        pages = Sequence(request=request, generation_id=0).worst_case_pages(capacity.page_size)
        if pages > capacity.pages - 1:
            room = (capacity.pages - 1) * capacity.page_size + 1 - prompt
            alternative = f"lower max_new_tokens to at most {room}" if room >= 1 else "shorten the prompt"
            raise CapacityError(
                f"prompt {request.prompt_id} needs {pages} pages of {capacity.page_size} tokens for its {prompt} "
                f"prompt and {new} new tokens; a replica has {capacity.pages - 1} (max_pages less the null page). "
                f"Raise max_pages to at least {pages + 1}, or {alternative}."
            )
        if len(request.params.stop_token_ids) > capacity.stop_ids:
            raise CapacityError(
                f"prompt {request.prompt_id} has {len(request.params.stop_token_ids)} stop token ids; the programs "
                f"were built for {capacity.stop_ids}. Give fewer stop_token_ids."
            )
        for name in request.params.own_filters():
            if name not in capacity.more_filters:
                raise CapacityError(
                    f"prompt {request.prompt_id} needs the filter {name!r} of the sampler; the programs were built "
                    f"with {', '.join(capacity.more_filters) or 'none'}. Prepare the engine with this request too."
                )
        for feature, size in sampling_sizes([request.params]).items():
            if size > getattr(capacity, feature):
                raise CapacityError(
                    f"prompt {request.prompt_id} needs {feature} {size} of the sampler; the programs were built with "
                    f"{feature} {getattr(capacity, feature)}. Prepare the engine with this request too."
                )
