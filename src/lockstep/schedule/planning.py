"""Builds the batch of the next launch from the state of the replicas: one function for each kind of batch."""

from collections.abc import Sequence as Seq

from lockstep.schedule.batch import Capacity, CopyPagesBatch, DecodeBatch, PrefillBatch, PromptLogprobsBatch
from lockstep.schedule.prompt_logprobs import PromptLogprobs
from lockstep.schedule.replica import Replica

_LAUNCH_COST = 4
"""The cost of a launch besides its steps, in steps: the host's work, gathering the context, the prefill of admitted
sequences. It is a guess: with true costs of 0.5 to 6, `num_decode_steps` comes within 6 % of the best fixed least
length at 8 to 64 slots, which is another one each time (benchmarks/admission.py).
"""
_EARLY_DIVISOR = 4
"""The longest launch is divided by this while sequences wait and any of those decoding may stop at any step."""


def num_decode_steps(remaining: Seq[int], limit: int, *, waiting: bool, may_stop: bool) -> int:
    """Returns the number of steps of a launch; a pure function, so that every host computes the same.

    While no sequence waits, a launch is as long as its longest sequence. While sequences wait, a long launch leaves
    slots idle whose sequences have ended, and a short launch pays the cost of a launch again: of all lengths at which a
    sequence ends, the one is chosen that samples the most tokens per step of cost. Where a sequence may end before its
    last token, its end is unknown, and a launch is at most a quarter of ``limit``.

    Args:
        remaining: The number of tokens that each active sequence may still sample, each at least 1.
        limit: The most steps of a launch.
        waiting: Whether other sequences wait for a slot or pages.
        may_stop: Whether an active sequence may end before its last token.
    """
    longest = min(limit, max(remaining))
    if not waiting:
        return longest
    if may_stop:
        longest = min(longest, max(1, limit // _EARLY_DIVISOR))
    ends = sorted(min(left, longest) for left in remaining)
    best, best_rate, ended = longest, 0.0, 0
    for index, steps in enumerate(ends):
        rate = (ended + steps * (len(ends) - index)) / (steps + _LAUNCH_COST)
        ended += steps
        if rate >= best_rate:
            best, best_rate = steps, rate
    return best


type PromptLogprobsRow = tuple[int, int, PromptLogprobs]
"""A replica, a row, and the record that the row's log-probabilities belong to."""


def prefill_batch(capacity: Capacity, replicas: Seq[Replica]) -> PrefillBatch:
    """Takes the next pages of prompts from the replicas' queues."""
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
            batch.start[r, row] = start
            batch.page[r, row] = sequence.pages[start // capacity.page_size]
            batch.page_table[r, row, : len(sequence.pages)] = sequence.pages
    return batch


def copy_pages_batch(capacity: Capacity, replicas: Seq[Replica]) -> CopyPagesBatch:
    """Takes every partial page that waits to be copied."""
    batch = CopyPagesBatch.empty(capacity)
    for replica in replicas:
        for at, (source, target) in enumerate(replica.take_page_copies()):
            batch.source[replica.index, at], batch.target[replica.index, at] = source, target
    return batch


def prompt_logprobs_batch(
    capacity: Capacity, replicas: Seq[Replica]
) -> tuple[PromptLogprobsBatch, list[PromptLogprobsRow]]:
    """Builds rows of prompts whose K/V is complete and whose log-probabilities are requested and missing.

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


def decode_batch(capacity: Capacity, replicas: Seq[Replica], *, waiting: bool) -> DecodeBatch:
    """Builds the decode batch of all sequences that have a slot.

    Args:
        capacity: The capacities.
        replicas: The replicas; at least one has a sequence.
        waiting: Whether sequences wait for a slot, so that the launch should end when one becomes free.
    """
    active = [sequence for replica in replicas for sequence in replica.slots if sequence is not None]
    steps = num_decode_steps(
        [sequence.remaining for sequence in active],
        capacity.steps,
        waiting=waiting,
        may_stop=any(s.request.params.stops or s.request.params.stop for s in active),
    )
    batch = DecodeBatch.empty(capacity, steps)
    for sequence in active:
        at = (sequence.replica, sequence.slot)
        params = sequence.request.params
        batch.token[at] = sequence.last_token
        batch.position[at] = sequence.position
        batch.remaining[at] = sequence.remaining
        batch.page_table[at][: len(sequence.pages)] = sequence.pages
        batch.stop_ids[at][: len(params.stops)] = params.stops
        batch.draw[at] = (params.seed, sequence.request.prompt_id, sequence.generation_id)
        batch.temperature[at] = params.temperature
        batch.sampling.set(at, sequence)
    return batch
