"""A device in plain Python: what it answers depends on every number that a sequence ever wrote and on nothing else."""

import dataclasses
from typing import Any

import numpy as np

from lockstep.schedule import (
    NULL_PAGE,
    Capacity,
    CopyPagesBatch,
    DecodeBatch,
    PrefillBatch,
    PromptLogprobsBatch,
    Scheduler,
)
from lockstep.types import Completion, FinishReason, Request

VOCAB = 7


def cached(context: tuple[int, ...], token: int, position: int) -> int:
    """What K/V is to a device: a number that depends on all tokens up to this one."""
    return hash((hash(context), token, position))


def sampled(number: int, draw: tuple[int, ...], temperature: float) -> int:
    return hash((number, draw, temperature)) % VOCAB


def worth(number: int, target: int) -> float:
    return -float(hash((number, target)) % 1000)


def scores_alone(request: Request) -> tuple[float | None, ...]:
    """The log-probabilities that the device gives to a prompt's own tokens."""
    found: list[float | None] = [None]
    context: tuple[int, ...] = ()
    prompt = request.prompt_tokens
    for position, (token, target) in enumerate(zip(prompt, prompt[1:], strict=False)):
        context = (*context, cached(context, token, position))
        found.append(worth(context[-1], target))
    return tuple(found)


def answer_alone(request: Request, generation_id: int) -> tuple[tuple[int, ...], FinishReason]:
    """The completion that the device gives when nobody else is there: no pages, no batch."""
    params = request.params
    draw = (params.seed, request.prompt_id, generation_id)
    known, context = list(request.prompt_tokens), ()
    for position, token in enumerate(known):
        context = (*context, cached(context, token, position))
    tokens: list[int] = []
    while True:
        tokens.append(sampled(context[-1], draw, params.temperature))
        if tokens[-1] in params.stop_token_ids:
            return tuple(tokens), FinishReason.STOP
        if len(tokens) == params.max_new_tokens:
            return tuple(tokens), FinishReason.LENGTH
        context = (*context, cached(context, tokens[-1], len(context)))


class FakeDevice:
    """Pages of numbers, a pool for each replica; the null page holds garbage from the start.

    Writes are checked as the real device's cannot be: on a page of the writer, which nobody else reads.
    """

    def __init__(self, sizes: Capacity) -> None:
        self.sizes = sizes
        garbage = np.random.default_rng(0).integers(1, 2**40, (sizes.replicas, sizes.pages, sizes.page_size))
        self.pool = garbage.astype(object)

    def context(self, replica: int, table: np.ndarray, position: int) -> tuple[int, ...]:
        """Everything before ``position``, read through a page table."""
        size = self.sizes.page_size
        assert position == 0 or table[(position - 1) // size] != NULL_PAGE, "the table does not cover what is read"
        return tuple(self.pool[replica, table[p // size], p % size] for p in range(position))

    def prefill(self, plan: PrefillBatch) -> None:
        """Rows of one launch see each other's numbers; rows of later launches do not exist yet."""
        for replica in range(self.sizes.replicas):
            for row in np.argsort(plan.start[replica], kind="stable"):
                page, start = plan.page[replica, row], plan.start[replica, row]
                table = plan.page_table[replica, row]
                if page == NULL_PAGE:
                    assert not table.any() and not start, "an unused row points to a page"
                    continue
                assert table[start // self.sizes.page_size] == page
                for i, token in enumerate(plan.tokens[replica, row]):
                    context = self.context(replica, table, start + i)
                    self.pool[replica, page, i] = cached(context, int(token), int(start) + i)

    def copy_pages(self, plan: CopyPagesBatch, readers: dict[int, dict[int, int]]) -> None:
        """All pages are read before any is written; one that is written has one reader, who wrote nothing to it yet."""
        before = self.pool.copy()
        for at in np.ndindex(plan.source.shape):
            replica, source, target = at[0], plan.source[at], plan.target[at]
            if target == NULL_PAGE:
                assert source == NULL_PAGE, "an unused entry points to a page"
                continue
            assert source != target and readers[replica][source] >= 1 and readers[replica][target] == 1
            self.pool[replica, target] = before[replica, source]
        targets = [[p for p in row if p != NULL_PAGE] for row in plan.target.tolist()]
        assert any(targets), "a launch that copies nothing"
        assert all(len(row) == len(set(row)) for row in targets), "a page is written twice"

    def score(self, plan: PromptLogprobsBatch) -> np.ndarray:
        """Minus a number that depends on everything up to the token before the target; nothing is written."""
        found = np.zeros(plan.targets.shape, np.float64)
        for replica, row, at in np.argwhere(plan.targets >= 0):
            position = int(plan.start[replica, row]) + int(at)
            context = self.context(replica, plan.page_table[replica, row], position + 1)
            token = int(plan.tokens[replica, row, at])
            assert context[-1] == cached(context[:-1], token, position), "K/V of the prompt is not complete"
            found[replica, row, at] = worth(context[-1], int(plan.targets[replica, row, at]))
        return found

    def launch(
        self, scheduler: Scheduler, plan: PrefillBatch | CopyPagesBatch | PromptLogprobsBatch | DecodeBatch
    ) -> None:
        """Does what a plan says, and commits it where it must be."""
        readers = {replica.index: replica.allocator._readers for replica in scheduler._replicas}
        if isinstance(plan, PrefillBatch):
            self.prefill(plan)
        elif isinstance(plan, CopyPagesBatch):
            self.copy_pages(plan, readers)
        elif isinstance(plan, PromptLogprobsBatch):
            scheduler.commit_prompt_logprobs(plan, self.score(plan))
        else:
            scheduler.commit(plan, *self.decode(plan, readers))

    def decode(self, plan: DecodeBatch, readers: dict[int, dict[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities of a launch; ``readers`` counts the readers of each page of each replica."""
        sizes = self.sizes
        tokens = np.full((sizes.replicas, sizes.slots, sizes.steps), -1, np.int32)
        logprobs = np.zeros(tokens.shape, np.float32)
        assert 1 <= plan.num_steps <= sizes.steps
        token, position, remaining = plan.token.copy(), plan.position.copy(), plan.remaining.copy()
        for step in range(plan.num_steps):
            for at in np.ndindex(sizes.replicas, sizes.slots):
                if not remaining[at]:
                    continue
                replica, table, p = at[0], plan.page_table[at], int(position[at])
                page = table[p // sizes.page_size]
                assert page != NULL_PAGE, "the table does not cover the written position"
                assert readers[replica][page] == 1, "a decode step writes to a page with several readers"
                number = cached(self.context(replica, table, p), int(token[at]), p)
                self.pool[replica, page, p % sizes.page_size] = number
                draw = tuple(int(word) for word in plan.draw[at])
                token[at] = sampled(number, draw, float(plan.temperature[at]))
                tokens[(*at, step)] = token[at]
                logprobs[(*at, step)] = -0.5 * token[at]
                position[at] += 1
                remaining[at] = 0 if token[at] in plan.stop_ids[at] else remaining[at] - 1
        return tokens, logprobs


@dataclasses.dataclass
class Played:
    """What a scheduler did from the first plan to the last."""

    completions: list[Completion]
    plans: list[PrefillBatch | CopyPagesBatch | PromptLogprobsBatch | DecodeBatch]
    most_active: int


def play(scheduler: Scheduler, check: Any = lambda: None) -> Played:
    """Drives a scheduler to its end on a fake device; ``check`` runs after every plan."""
    device, plans, most = FakeDevice(scheduler.sizes), [], 0
    while (plan := scheduler.next_batch()) is not None:
        check()
        plans.append(plan)
        if isinstance(plan, DecodeBatch):
            most = max(most, int((plan.remaining > 0).sum()))
        device.launch(scheduler, plan)
    return Played(scheduler.completions(), plans, most)
