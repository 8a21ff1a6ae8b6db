"""Requests that come while others are answered, and what conversations keep: the whole scheduler on a fake device."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import Capacity, Scheduler
from lockstep.errors import CapacityError
from lockstep.types import Completion, Request
from tests.unit.engine.schedule.fake_device import ROUTED, FakeDevice, answer_alone, routed_alone
from tests.unit.engine.schedule.test_scheduler import capacity_of, request


class Talk:
    """Conversations: requests that go on from the answers to earlier ones, which arrive some launches later."""

    def __init__(
        self, prompts: list[tuple[int, ...]], turns: list[int], said: tuple[int, ...], new: int, **options: Any
    ) -> None:
        self.turns, self.said, self.new, self.arrived = turns, said, new, deque[Request]()
        self.options = {"stop_token_ids": (3,), **options}
        self.tokens, self.asked, self.late = list(prompts), [0] * len(prompts), list[tuple[int, int]]()
        self.open = len(prompts)
        self.answers: dict[int, tuple[Request, Completion]] = {}
        self.requests: dict[int, Request] = {}
        for number in range(len(prompts)):
            self.ask(number)

    def ask(self, number: int) -> None:
        place = self.asked[number] * len(self.turns) + number
        one = request(place, self.tokens[number], self.new, **self.options)
        self.arrived.append(dataclasses.replace(one, conversation=number))
        self.requests[one.prompt_id] = self.arrived[-1]
        self.asked[number] += 1

    def __iter__(self) -> Iterator[Request | None]:
        while self.open:
            yield self.arrived.popleft() if self.arrived else None

    def answered(self, scheduler: Scheduler, completions: list[Completion], delays: Iterator[int]) -> None:
        """Take answers; each is replied to when as many launches have been made as the next delay says."""
        self.late = [(number, delay - 1) for number, delay in self.late]
        for completion in completions:
            one = self.requests[completion.prompt_id]
            self.answers[completion.prompt_id] = (one, completion)
            number = completion.prompt_id % len(self.turns)
            self.tokens[number] = (*one.prompt_tokens, *completion.tokens, *self.said)
            if self.asked[number] == self.turns[number]:
                scheduler.forget(number)
                self.open -= 1
            else:
                self.late.append((number, next(delays)))
        for number in [number for number, delay in self.late if delay <= 0]:
            self.ask(number)
        self.late = [pair for pair in self.late if pair[1] > 0]


def talk(capacity: Capacity, conversations: Talk, delays: list[int], **options: Any) -> Scheduler:
    """Play conversations to their end."""
    scheduler = Scheduler(capacity, iter(conversations), **options)
    device, replies = FakeDevice(capacity), itertools.cycle(delays)
    for _ in range(10_000):
        if (batch := scheduler.next_batch()) is not None:
            device.launch(scheduler, batch)
        elif scheduler.done:
            break
        else:
            assert scheduler.starved and not scheduler._num_active
        conversations.answered(scheduler, scheduler.take_answered(), replies)
    assert scheduler.done and not conversations.open
    for one, completion in conversations.answers.values():
        assert (completion.tokens, completion.finish_reason) == answer_alone(one, 0)
    for replica in scheduler._replicas:
        allocator = replica.allocator
        assert allocator.num_free == capacity.pages - 1 and not allocator.num_idle, "pages leak"
        assert not (allocator._keepers or allocator._kept or replica._prefixes._pages), "forgotten pages are listed"
    return scheduler


@settings(max_examples=60)
@given(st.data())
def test_turns_that_come_later_are_answered_as_if_they_were_alone(data: st.DataObject) -> None:
    """Few pages and slots, any order of arrival: K/V that was kept, shared, taken away or elsewhere changes nothing."""
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5)
    )
    turns = data.draw(st.lists(st.integers(1, 4), min_size=len(prompts), max_size=len(prompts)))
    page_size, replicas, slots = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 2)), 2
    longest = -(-(6 + 4 * (4 + 2)) // page_size)
    capacity = capacity_of(
        replicas=replicas, slots=slots, sequences=replicas * slots, page_size=page_size, pages_per_sequence=longest,
        pages=1 + data.draw(st.integers(longest, 3 * longest)), page_copies=data.draw(st.integers(0, 1)),
    )  # fmt: skip
    delays = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    share = data.draw(st.booleans())
    conversations = Talk(prompts, turns, said=(1, 0), new=4)
    scheduler = talk(
        capacity, conversations, delays, share_prefixes=share, max_prompts=data.draw(st.none() | st.just(2))
    )
    assert len(conversations.answers) == sum(turns)
    assert share or not scheduler.counts.prefilled_again


def test_a_second_turn_costs_its_new_tokens_only() -> None:
    """In whole pages: the tokens from the last full page of the first turn on are prefilled."""
    conversations = Talk([tuple(range(20, 31)), tuple(range(40, 51))], [3, 3], said=(1, 0, 2, 4), new=8)
    counts = talk(capacity_of(page_size=4, pages=100, pages_per_sequence=20), conversations, [3, 0]).counts
    expected = 0
    for number in range(2):
        had = 0
        for turn in range(3):
            one, completion = conversations.answers[2 * turn + number]
            expected += len(one.prompt_tokens) - 1 - had
            had = (len(one.prompt_tokens) + len(completion.tokens) - 1) // 4 * 4
    assert (counts.prefilled, counts.prefilled_again) == (expected, 0)
    whole = sum(len(one.prompt_tokens) - 1 for one, _ in conversations.answers.values())
    assert counts.prefilled < 0.6 * whole, "there is something to spare"


def test_what_memory_was_wanted_for_is_prefilled_again_and_counted() -> None:
    tight = capacity_of(page_size=4, pages=13, pages_per_sequence=12, slots=1, sequences=1)
    conversations = Talk([tuple(range(10 * n, 10 * n + 9)) for n in range(3)], [3] * 3, said=(1, 0, 2), new=8)
    counts = talk(tight, conversations, [2]).counts
    whole = sum(len(one.prompt_tokens) - 1 for one, _ in conversations.answers.values())
    assert 0 < counts.prefilled_again < counts.prefilled <= whole


def test_turns_have_the_experts_of_all_their_tokens() -> None:
    capacity = capacity_of(page_size=2, pages=60, pages_per_sequence=20, routed_experts=1)
    conversations = Talk([(0, 1, 1, 0, 1, 1), (0, 1, 1)], [3, 2], said=(1, 0), new=3, routed_experts=True)
    talk(capacity, conversations, [1, 0], routed=ROUTED)
    for one, completion in conversations.answers.values():
        assert completion.routed_experts is not None
        words = np.frombuffer(completion.routed_experts.packed, np.int32)
        assert words.tolist() == routed_alone(one, completion.tokens)


def test_a_request_that_can_never_fit_is_refused_when_it_is_read() -> None:
    conversations = Talk([(0, 1)], [2], said=tuple(range(12)), new=4)
    with pytest.raises(CapacityError, match="prompt 1 has "):
        talk(capacity_of(), conversations, [0])
