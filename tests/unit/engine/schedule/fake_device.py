"""A device in plain Python: what it answers depends on every number that a sequence ever wrote and on nothing else."""

import dataclasses
from typing import Any

import numpy as np

from lockstep.engine.schedule import (
    NULL_PAGE,
    Capacity,
    CopyPagesBatch,
    DecodeBatch,
    DecodeResults,
    PrefillBatch,
    PromptLogprobsBatch,
    RoutedShape,
    Scheduler,
    VerifyBatch,
)
from lockstep.types import Completion, FinishReason, Request

VOCAB = 7
ROUTED = RoutedShape(layers=1, choices=2, experts=2**15)
"""Experts of which a token's are one word."""


def cached(context: tuple[int, ...], token: int, position: int) -> int:
    """What K/V is to a device: a number that depends on all tokens up to this one."""
    return hash((hash(context), token, position))


def sampled(number: int, draw: tuple[int, ...], temperature: float) -> int:
    return hash((number, draw, temperature)) % VOCAB


def routed_word(number: int) -> int:
    """The experts of a token whose K/V is a number."""
    return number & 0x7FFF7FFF


def routed_alone(request: Request, tokens: tuple[int, ...]) -> list[int]:
    """The words of the experts that the device gives to all tokens but the last."""
    context: tuple[int, ...] = ()
    for position, token in enumerate([*request.prompt_tokens, *tokens[:-1]]):
        context = (*context, cached(context, token, position))
    return [routed_word(number) for number in context]


def prompt_logprob(number: int, target: int) -> float:
    return -float(hash((number, target)) % 1000)


def scores_alone(request: Request) -> tuple[float | None, ...]:
    """The log-probabilities that the device gives to a prompt's own tokens."""
    found: list[float | None] = [None]
    context: tuple[int, ...] = ()
    prompt = request.prompt_tokens
    for position, (token, target) in enumerate(zip(prompt, prompt[1:], strict=False)):
        context = (*context, cached(context, token, position))
        found.append(prompt_logprob(context[-1], target))
    return tuple(found)


def answer_alone(request: Request, generation_id: int) -> tuple[tuple[int, ...], FinishReason]:
    """The completion that the device gives to a request alone: no pages, no batch."""
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

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        garbage = np.random.default_rng(0).integers(1, 2**40, (capacity.replicas, capacity.pages, capacity.page_size))
        self.pool = garbage.astype(object)
        self.steps = 0
        """Steps of decoding and verifying, counted once for each sequence."""

    def context(self, replica: int, table: np.ndarray, position: int) -> tuple[int, ...]:
        """Everything before ``position``, read through a page table."""
        size = self.capacity.page_size
        assert position == 0 or table[(position - 1) // size] != NULL_PAGE, "the table does not cover what is read"
        return tuple(self.pool[replica, table[p // size], p % size] for p in range(position))

    def prefill(self, batch: PrefillBatch) -> None:
        """Rows of one launch see each other's numbers; rows of later launches do not exist yet."""
        for replica in range(self.capacity.replicas):
            for row in np.argsort(batch.start[replica], kind="stable"):
                page, start = batch.page[replica, row], batch.start[replica, row]
                table = batch.page_table[replica, row]
                if page == NULL_PAGE:
                    assert not table.any() and not start, "an unused row points to a page"
                    continue
                assert table[start // self.capacity.page_size] == page
                for i, token in enumerate(batch.tokens[replica, row]):
                    context = self.context(replica, table, start + i)
                    self.pool[replica, page, i] = cached(context, int(token), int(start) + i)

    def copy_pages(self, batch: CopyPagesBatch, references: dict[int, dict[int, int]]) -> None:
        """All pages are read before any is written; one that is written has one owner, which wrote nothing yet."""
        before = self.pool.copy()
        for at in np.ndindex(batch.source.shape):
            replica, source, target = at[0], batch.source[at], batch.target[at]
            if target == NULL_PAGE:
                assert source == NULL_PAGE, "an unused entry points to a page"
                continue
            assert source != target and references[replica][source] >= 1 and references[replica][target] == 1
            self.pool[replica, target] = before[replica, source]
        targets = [[p for p in row if p != NULL_PAGE] for row in batch.target.tolist()]
        assert any(targets), "a launch that copies nothing"
        assert all(len(row) == len(set(row)) for row in targets), "a page is written twice"

    def prompt_logprobs(self, batch: PromptLogprobsBatch) -> np.ndarray:
        """Minus a number that depends on everything up to the token before the target; nothing is written."""
        found = np.zeros(batch.targets.shape, np.float64)
        for replica, row, at in np.argwhere(batch.targets >= 0):
            position = int(batch.start[replica, row]) + int(at)
            context = self.context(replica, batch.page_table[replica, row], position + 1)
            token = int(batch.tokens[replica, row, at])
            assert context[-1] == cached(context[:-1], token, position), "K/V of the prompt is not complete"
            found[replica, row, at] = prompt_logprob(context[-1], int(batch.targets[replica, row, at]))
        return found

    def launch(
        self,
        scheduler: Scheduler,
        batch: PrefillBatch | CopyPagesBatch | PromptLogprobsBatch | DecodeBatch | VerifyBatch,
    ) -> None:
        """Computes a batch, and commits it where it must be."""
        references = {replica.index: replica.allocator._references for replica in scheduler._replicas}
        if isinstance(batch, PrefillBatch):
            self.prefill(batch)
            if self.capacity.routed_experts:
                words = np.zeros((self.capacity.replicas, 1, *batch.tokens.shape[1:]), np.int32)
                for replica, row in np.argwhere(batch.page != NULL_PAGE):
                    words[replica, 0, row] = [
                        routed_word(each) for each in self.pool[replica, batch.page[replica, row]]
                    ]
                scheduler.commit_routed(batch, words)
        elif isinstance(batch, CopyPagesBatch):
            self.copy_pages(batch, references)
            if self.capacity.routed_experts:
                scheduler.commit_routed(batch)
        elif isinstance(batch, PromptLogprobsBatch):
            scheduler.commit_prompt_logprobs(batch, self.prompt_logprobs(batch))
        elif isinstance(batch, VerifyBatch):
            scheduler.work_ahead()
            scheduler.commit(batch, self.verify(batch, references))
        else:
            scheduler.work_ahead()
            scheduler.commit(batch, self.decode(batch, references))

    def verify(self, batch: VerifyBatch, references: dict[int, dict[int, int]]) -> DecodeResults:
        """Tokens of a launch that verifies: in each step all inputs are written first, and read then."""
        capacity, given, width = self.capacity, batch.decode, batch.width
        tokens = np.full((capacity.replicas, capacity.slots, capacity.draft_tokens), -1, np.int32)
        steps = np.zeros_like(tokens)
        assert 1 <= given.num_steps <= capacity.draft_tokens // width
        for at in np.ndindex(capacity.replicas, capacity.slots):
            token, position, remaining, done = (
                int(each[at]) for each in (given.token, given.position, given.remaining, given.remaining * 0)
            )
            table = given.page_table[at]
            for step in range(given.num_steps):
                if not remaining:
                    break
                self.steps += 1
                draft = batch.drafts[at][done : done + width - 1].tolist()
                inputs = [token, *draft][:remaining]
                inputs = inputs[: inputs.index(-1)] if -1 in inputs else inputs
                numbers = []
                for i, each in enumerate(inputs):
                    page = table[(position + i) // capacity.page_size]
                    assert page != NULL_PAGE and references[at[0]][page] == 1
                    numbers.append(cached(self.context(at[0], table, position + i), each, position + i))
                    self.pool[at[0], page, (position + i) % capacity.page_size] = numbers[-1]
                for i, number in enumerate(numbers):
                    token = sampled(number, tuple(int(word) for word in given.draw[at]), float(given.temperature[at]))
                    tokens[(*at, done)], steps[(*at, done)] = token, step
                    done, position, remaining = done + 1, position + 1, remaining - 1
                    if token in given.stop_ids[at]:
                        remaining = 0
                    if not remaining or i + 1 == len(inputs) or inputs[i + 1] != token:
                        break
        packed = DecodeResults.of(tokens, np.where(tokens >= 0, -0.5 * tokens, 0).astype(np.float32)).packed
        return DecodeResults(packed=np.concatenate([packed, steps[:, None]], axis=1))

    def decode(self, batch: DecodeBatch, references: dict[int, dict[int, int]]) -> DecodeResults:
        """Tokens and log-probabilities of a launch; ``references`` counts those to each page of each replica."""
        capacity = self.capacity
        tokens = np.full((capacity.replicas, capacity.slots, capacity.steps), -1, np.int32)
        logprobs, words = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.int32)
        assert 1 <= batch.num_steps <= capacity.steps
        token, position, remaining = batch.token.copy(), batch.position.copy(), batch.remaining.copy()
        for step in range(batch.num_steps):
            for at in np.ndindex(capacity.replicas, capacity.slots):
                if not remaining[at]:
                    continue
                self.steps += 1
                replica, table, p = at[0], batch.page_table[at], int(position[at])
                page = table[p // capacity.page_size]
                assert page != NULL_PAGE, "the table does not cover the written position"
                assert references[replica][page] == 1, "a decode step writes to a page that several sequences have"
                number = cached(self.context(replica, table, p), int(token[at]), p)
                self.pool[replica, page, p % capacity.page_size] = number
                draw = tuple(int(word) for word in batch.draw[at])
                token[at] = sampled(number, draw, float(batch.temperature[at]))
                tokens[(*at, step)] = token[at]
                logprobs[(*at, step)], words[(*at, step)] = -0.5 * token[at], routed_word(number)
                position[at] += 1
                remaining[at] = 0 if token[at] in batch.stop_ids[at] else remaining[at] - 1
        results = DecodeResults.of(tokens, logprobs)
        if not capacity.routed_experts:
            return results
        return DecodeResults(packed=np.concatenate([results.packed, words[:, None]], axis=1))


@dataclasses.dataclass
class Played:
    """What a scheduler did from the first batch to the last."""

    completions: list[Completion]
    batches: list[PrefillBatch | CopyPagesBatch | PromptLogprobsBatch | DecodeBatch | VerifyBatch]
    most_active: int
    steps: int = 0

    @property
    def decoded(self) -> list[DecodeBatch]:
        """The launches that decode without drafts."""
        return [batch for batch in self.batches if isinstance(batch, DecodeBatch)]

    @property
    def launches(self) -> int:
        """The number of launches that sample tokens."""
        return sum(isinstance(batch, DecodeBatch | VerifyBatch) for batch in self.batches)


def play(scheduler: Scheduler, check: Any = lambda: None) -> Played:
    """Drives a scheduler to its end on a fake device; ``check`` runs after every batch."""
    device, batches, most = FakeDevice(scheduler.capacity), [], 0
    while (batch := scheduler.next_batch()) is not None:
        check()
        batches.append(batch)
        if isinstance(batch, DecodeBatch):
            most = max(most, int((batch.remaining > 0).sum()))
        device.launch(scheduler, batch)
    return Played(scheduler.completions(), batches, most, device.steps)
