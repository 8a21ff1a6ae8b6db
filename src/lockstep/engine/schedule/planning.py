"""Builds the batch of the next launch from the state of the replicas: one function for each kind of batch."""

from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Int

from lockstep.engine.schedule.batch import Capacity, CopyPagesBatch, PrefillBatch, PromptLogprobsBatch
from lockstep.engine.schedule.prompt_logprobs import PromptLogprobs
from lockstep.engine.schedule.replica import Replica

_LAUNCH_COST = 4
"""The cost of a launch besides its steps, in steps: the host's work, gathering the context, the prefill of admitted
sequences. It is a guess: with true costs of 0.5 to 6, `num_decode_steps` comes within 5 % of the best fixed least
length at 8 to 256 slots, whether answers stop early or not; that is another one each time (benchmarks/admission.py).
"""


def num_decode_steps(remaining: Int[np.ndarray, " sequence"], limit: int, *, waiting: bool, stop_rate: float) -> int:
    """Returns the number of steps of a launch; a pure function, so that every host computes the same.

    While no sequence waits, a launch is as long as its longest sequence. While sequences wait, a long launch leaves
    slots idle whose sequences have ended, and a short launch pays the cost of a launch again: of all lengths the one is
    chosen that is expected to sample the most tokens per step of cost; of equal ones the longest.

    Args:
        remaining: The number of tokens that each active sequence may still sample, each at least 1.
        limit: The most steps of a launch.
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
