"""Plans for the next launch, written from what the replicas hold: each function fills one kind of plan."""

from collections.abc import Sequence as Seq

from lockstep.schedule.launch_length import launch_steps
from lockstep.schedule.plan import DecodePlan, ForkPlan, PrefillPlan, ScheduleSizes, ScorePlan
from lockstep.schedule.replica import Replica
from lockstep.schedule.scores import PromptScores

type ScoredRow = tuple[int, int, PromptScores]
"""Replica, row, and the record that the row's log-probabilities belong to."""


def plan_prefill(sizes: ScheduleSizes, replicas: Seq[Replica]) -> PrefillPlan:
    """The next pages of prompts, taken from the replicas' queues."""
    plan = PrefillPlan.empty(sizes)
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


def plan_forks(sizes: ScheduleSizes, replicas: Seq[Replica]) -> ForkPlan:
    """Every partial page that waits to be copied."""
    plan = ForkPlan.empty(sizes)
    for replica in replicas:
        for at, (source, target) in enumerate(replica.take_forks()):
            plan.source[replica.index, at], plan.target[replica.index, at] = source, target
    return plan


def plan_scores(sizes: ScheduleSizes, replicas: Seq[Replica]) -> tuple[ScorePlan, list[ScoredRow]]:
    """Rows of prompts whose K/V is complete, none if there are none left to score.

    Of several generations any will do; the first is taken.
    """
    plan, rows, begun = ScorePlan.empty(sizes), list[ScoredRow](), set[PromptScores]()
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


def plan_decode(sizes: ScheduleSizes, replicas: Seq[Replica], *, waiting: bool) -> DecodePlan:
    """All sequences that have a slot.

    Args:
        sizes: capacities.
        replicas: with at least one sequence.
        waiting: whether others wait for a slot, so that a launch should end when one becomes free.
    """
    active = [sequence for replica in replicas for sequence in replica.slots if sequence is not None]
    steps = launch_steps(
        [sequence.remaining for sequence in active],
        sizes.steps,
        waiting=waiting,
        may_stop=any(s.request.params.stops or s.request.params.stop for s in active),
    )
    plan = DecodePlan.empty(sizes, steps)
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
