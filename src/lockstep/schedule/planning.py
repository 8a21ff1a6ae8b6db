"""Plans for the next launch, written from what the replicas hold: each function fills one kind of plan."""

from collections.abc import Sequence
from collections.abc import Sequence as Seq

from lockstep.schedule.batch import Capacity, CopyPagesBatch, DecodeBatch, PrefillBatch, PromptLogprobsBatch
from lockstep.schedule.prompt_logprobs import PromptLogprobs
from lockstep.schedule.replica import Replica

_LAUNCH_COST = 4
"""What a launch costs besides its steps, in steps: the host's work, the context laid out anew, the prefill of those who
are let in. A guess: with true costs of 0.5 to 6 the choice below comes within 6 % of the best fixed least length at 8
to 64 slots, each time another one (benchmarks/admission.py).
"""
_EARLY_PART = 4
"""The part of the longest launch that is run while others wait for sequences that may end at any step."""


def num_decode_steps(remaining: Sequence[int], limit: int, *, waiting: bool, may_stop: bool) -> int:
    """The number of steps of a launch; a pure function, so every host computes the same.

    With nobody waiting a launch is as long as its longest sequence. While others wait, a long launch leaves slots idle
    that have ended, and a short one pays for the launch again: of all lengths at which a sequence ends, the one that
    samples the most tokens per step paid for. Sequences that may stop early end nobody knows when, so there a launch is
    a quarter of ``limit`` at most.

    Args:
        remaining: tokens that each active sequence may still sample, each at least 1.
        limit: steps of a launch at most.
        waiting: whether other sequences wait for a slot or pages.
        may_stop: whether an active sequence may end before its last token.
    """
    longest = min(limit, max(remaining))
    if not waiting:
        return longest
    if may_stop:
        longest = min(longest, max(1, limit // _EARLY_PART))
    ends = sorted(min(left, longest) for left in remaining)
    best, best_rate, ended = longest, 0.0, 0
    for index, steps in enumerate(ends):
        rate = (ended + steps * (len(ends) - index)) / (steps + _LAUNCH_COST)
        ended += steps
        if rate >= best_rate:
            best, best_rate = steps, rate
    return best


type PromptLogprobsRow = tuple[int, int, PromptLogprobs]
"""Replica, row, and the record that the row's log-probabilities belong to."""


def prefill_batch(sizes: Capacity, replicas: Seq[Replica]) -> PrefillBatch:
    """The next pages of prompts, taken from the replicas' queues."""
    plan = PrefillBatch.empty(sizes)
    for replica in replicas:
        r = replica.index
        for row, (sequence, start) in enumerate(replica.take_prefill_rows(sizes.prefill_rows, sizes.prefill_sequences)):
            end = min(start + sizes.page_size, sequence.num_prefill)
            # What follows the prompt on its last page is seen by nobody, but 0 times NaN is NaN: so it is no token but
            # one that the row's queries see anyway.
            plan.tokens[r, row] = sequence.request.prompt_tokens[start]
            plan.tokens[r, row, : end - start] = sequence.request.prompt_tokens[start:end]
            plan.start[r, row] = start
            plan.page[r, row] = sequence.pages[start // sizes.page_size]
            plan.page_table[r, row, : len(sequence.pages)] = sequence.pages
    return plan


def copy_pages_batch(sizes: Capacity, replicas: Seq[Replica]) -> CopyPagesBatch:
    """Every partial page that waits to be copied."""
    plan = CopyPagesBatch.empty(sizes)
    for replica in replicas:
        for at, (source, target) in enumerate(replica.take_page_copies()):
            plan.source[replica.index, at], plan.target[replica.index, at] = source, target
    return plan


def prompt_logprobs_batch(
    sizes: Capacity, replicas: Seq[Replica]
) -> tuple[PromptLogprobsBatch, list[PromptLogprobsRow]]:
    """Rows of prompts whose K/V is complete, none if there are none left to score.

    Of several generations any will do; the first is taken.
    """
    plan, rows, begun = PromptLogprobsBatch.empty(sizes), list[PromptLogprobsRow](), set[PromptLogprobs]()
    for replica in replicas:
        r, row = replica.index, 0
        for sequence in replica.slots:
            scores = None if sequence is None else sequence.scores
            if sequence is None or scores is None or scores.done or scores in begun:
                continue
            begun.add(scores)
            prompt = sequence.request.prompt_tokens
            for start in range(len(scores.logprobs), len(prompt) - 1, sizes.page_size):
                if row == sizes.prefill_rows:
                    break
                end = min(start + sizes.page_size, len(prompt) - 1)
                known, following = prompt[start:end], prompt[start + 1 : end + 1]
                plan.tokens[r, row] = known[0]
                plan.tokens[r, row, : len(known)] = known
                plan.targets[r, row, : len(following)] = following
                plan.start[r, row] = start
                plan.page_table[r, row, : len(sequence.pages)] = sequence.pages
                rows.append((r, row, scores))
                row += 1
    return plan, rows


def decode_batch(sizes: Capacity, replicas: Seq[Replica], *, waiting: bool) -> DecodeBatch:
    """All sequences that have a slot.

    Args:
        sizes: capacities.
        replicas: with at least one sequence.
        waiting: whether others wait for a slot, so that a launch should end when one becomes free.
    """
    active = [sequence for replica in replicas for sequence in replica.slots if sequence is not None]
    steps = num_decode_steps(
        [sequence.remaining for sequence in active],
        sizes.steps,
        waiting=waiting,
        may_stop=any(s.request.params.stops or s.request.params.stop for s in active),
    )
    plan = DecodeBatch.empty(sizes, steps)
    for sequence in active:
        at = (sequence.replica, sequence.slot)
        params = sequence.request.params
        plan.token[at] = sequence.last_token
        plan.position[at] = sequence.position
        plan.remaining[at] = sequence.remaining
        plan.page_table[at][: len(sequence.pages)] = sequence.pages
        plan.stop_ids[at][: len(params.stops)] = params.stops
        plan.draw[at] = (params.seed, sequence.request.prompt_id, sequence.generation_id)
        plan.temperature[at] = params.temperature
        plan.sampling.set(at, sequence)
    return plan
