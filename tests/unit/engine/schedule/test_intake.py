"""Requests that come while others are answered, what conversations keep, and what is refused: on a fake device."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import Capacity, Scheduler, check_capacity, sampling_sizes
from lockstep.engine.schedule.intake import Admission
from lockstep.engine.schedule.replica import Replica
from lockstep.errors import CapacityError
from lockstep.types import Completion, Request, SamplingParams
from tests.unit.engine.schedule.fake_device import ROUTED, FakeDevice, answer_alone, routed_alone
from tests.unit.engine.schedule.placements import choose
from tests.unit.engine.schedule.test_replica import PAGE, sequence_of
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
    if not share:  # such as with states: all that the turn before had is prefilled once more, but its last token
        ends = [
            len(one.prompt_tokens) + len(completion.tokens) - 1
            for place, (one, completion) in conversations.answers.items()
            if place + len(turns) in conversations.answers
        ]
        assert scheduler.counts.prefilled_again == sum(ends)


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


def test_what_a_request_needs_of_the_program() -> None:
    names = ("filters", "penalties", "min_tokens", "bias_ids", "allowed_ids", "top_logprobs", "prompt_logprobs")
    none = dict.fromkeys((*names, "routed_experts"), 0)
    assert sampling_sizes([]) == none
    filtered = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    for greedy in (SamplingParams(max_new_tokens=8, stop_token_ids=(1,)), SamplingParams(max_new_tokens=8, **filtered)):
        assert sampling_sizes([greedy]) == none  # a greedy answer draws from no distribution
    for name, value in filtered.items():
        assert sampling_sizes([SamplingParams(max_new_tokens=8, temperature=1.0, **{name: value})])["filters"] == 1
    neutral = SamplingParams(max_new_tokens=8, temperature=1.0, stop_token_ids=(1,))
    assert sampling_sizes([neutral]) == none
    lists = SamplingParams(max_new_tokens=8, logit_bias=((1, 1.0),), allowed_token_ids=tuple(range(9)))
    counts = SamplingParams(max_new_tokens=8, frequency_penalty=0.5, min_tokens=2, stop_token_ids=(1,), top_logprobs=3)
    counts = dataclasses.replace(counts, prompt_logprobs=True, routed_experts=True)
    assert sampling_sizes([lists, neutral, counts]) == {
        "filters": 0,
        "penalties": 1,
        "min_tokens": 1,
        "bias_ids": 8,
        "allowed_ids": 16,
        "top_logprobs": 3,
        "prompt_logprobs": 1,
        "routed_experts": 1,
    }
    # Where no stop token ends an answer there is none to rule out.
    assert not any(sampling_sizes([SamplingParams(max_new_tokens=8, min_tokens=2)]).values())


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)


@settings(max_examples=300)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(6, 16),
    st.booleans(),
    st.lists(st.tuples(PROMPTS, st.integers(1, 4), st.booleans(), st.integers(0, 20)), max_size=30),
)
def test_it_is_the_choice_of_one_after_the_other(replicas, slots, pages, copies, steps):
    capacity = capacity_of(page_size=PAGE, slots=slots, pages=pages, replicas=replicas, page_copies=int(copies))
    made = [Replica(index, capacity) for index in range(replicas)]
    admission, active = Admission(capacity, made), []
    for number, (prompt, new, crowded, leaves) in enumerate(steps):
        sequence = sequence_of(number, prompt, new)
        replica = admission.choose(sequence, crowded=crowded)
        assert replica is choose(made, sequence, crowded)
        if replica is not None:
            replica.admit(sequence)
            active.append(sequence)
        elif active:
            sequence = active.pop(leaves % len(active))
            replica = made[sequence.replica]
            replica.release(sequence)
        if replica is not None:
            admission.update(replica)
    for sequence in active:
        made[sequence.replica].release(sequence)
    assert not made[0].holders, "what nobody has is listed nowhere"


def test_replicas_that_are_idle_are_given_nothing() -> None:
    capacity = capacity_of(page_size=PAGE, slots=2, replicas=4, idle_replicas=2)
    made = [Replica(index, capacity) for index in capacity.active_replicas]
    admission, chosen = Admission(capacity, made), []
    for number in range(5):
        sequence = sequence_of(number, (number, number))
        replica = admission.choose(sequence, crowded=False)
        chosen.append(None if replica is None else replica.index)
        if replica is not None:
            replica.admit(sequence)
            admission.update(replica)
    assert chosen == [0, 2, 0, 2, None]


@pytest.mark.parametrize(
    ("one", "capacity", "message"),
    [
        (
            request(7, 10, 8),
            capacity_of(),
            r"prompt 7 has 10 tokens and max_new_tokens is 8, 18 together; max_seq_len is 16\. Shorten the prompt to "
            r"at most 8 tokens, or lower max_new_tokens to at most 6, or raise max_seq_len to at least 18\.",
        ),
        (request(7, 16, 3), capacity_of(), r"16\. Shorten the prompt to at most 13 tokens, or raise max_seq_len"),
        (request(7, 3, 16), capacity_of(), r"16\. Lower max_new_tokens to at most 13, or raise max_seq_len"),
        (request(7, 16, 16), capacity_of(), r"max_seq_len is 16\. Raise max_seq_len to at least 32\.$"),
        (
            request(7, 6, 5),
            capacity_of(pages=5),
            r"prompt 7 needs 5 pages of 2 tokens for its 6 prompt and 5 new tokens; a replica has 4 .* Raise max_pages "
            r"to at least 6, or lower max_new_tokens to at most 3\.",
        ),
        (request(7, 12, 1), capacity_of(pages=5), r"Raise max_pages to at least 7, or shorten the prompt\."),
        (request(7, 1, 1, stop_token_ids=(1, 2, 3)), capacity_of(), "3 stop token ids; the programs were built for 2"),
    ],
)
def test_what_can_never_fit_is_refused(one: Request, capacity: Capacity, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        Scheduler(capacity, [request(0, 1, 1), one])


@pytest.mark.parametrize("prompt", [1, 2, 5, 12])
def test_the_values_that_a_refusal_names_work(prompt: int) -> None:
    for pages in range(2, 9):
        capacity = capacity_of(pages=pages)
        room = (pages - 1) * capacity.page_size + 1 - prompt
        if 1 <= room <= 16 - prompt:
            check_capacity(capacity, [request(0, prompt, room)])
        if room + 1 <= 16 - prompt:
            with pytest.raises(CapacityError, match=rf"^prompt 0 needs .* a replica has {pages - 1} "):
                check_capacity(capacity, [request(0, prompt, max(room + 1, 1))])
