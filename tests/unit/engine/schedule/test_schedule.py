"""Sequences that do not end by themselves: cancelled, out of time, by a stop string. The others go on as before."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lockstep.engine.schedule import Capacity, Scheduler
from lockstep.errors import ConfigError
from lockstep.types import Completion, FinishReason, Request
from tests.unit.engine.schedule.fake_device import FakeDevice, answer_alone, scores_alone
from tests.unit.engine.schedule.test_scheduler import capacity_of, cases, pages_of, request


def find_stop(tokens: Sequence[int], start: int, stops: Sequence[str], after: Sequence[int] = ()) -> int | None:
    """Stop strings over an alphabet of one letter per token."""
    text = "".join(chr(ord("a") + token) for token in tokens)
    return next((n for n in range(start + 1, len(text) + 1) if any(stop in text[:n] for stop in stops)), None)


def answer(one: Request, generation: int) -> tuple[tuple[int, ...], FinishReason]:
    tokens, reason = answer_alone(one, generation)
    end = find_stop(tokens, 0, one.params.stop) if one.params.stop else None
    return (tokens, reason) if end is None else (tokens[:end], FinishReason.STOP)


SEEN: collections.Counter[str] = collections.Counter()
"""What the state machine has come across."""


class Run:
    """A scheduler and its device, launch by launch."""

    def __init__(self, capacity: Capacity, requests: list[Request], **options: Any) -> None:
        source = requests if options.get("max_prompts") is None else iter(requests)
        self.scheduler = Scheduler(capacity, source, find_stop, **options)
        self.device = FakeDevice(capacity)
        self.requests = {r.prompt_id: r for r in requests}

    def launch(self) -> bool:
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.device.launch(self.scheduler, batch)
            SEEN[type(batch).__name__] += 1
        return batch is not None

    def see(self, what: str, name: tuple[int, int] | None = None) -> None:
        """Counts in which state sequences end: that of ``name``, or any."""
        for replica in self.scheduler._replicas:
            sources = [source for source, _ in replica._page_copies]
            states = {
                "copied from": sources,
                "copied to": [target for _, target in replica._page_copies],
                "prefilling": replica._queue,
                "sharing pages": [s for s in replica.slots if s and set(s.pages) & self.shared_pages(replica)],
            }
            for state, sequences in states.items():
                names = [(s.request.prompt_id, s.generation_id) for s in sequences]
                SEEN[f"{what} {state}"] += name in names if name else bool(names)
        SEEN[f"{what} waiting"] += any(
            name in (None, (s.request.prompt_id, s.generation_id)) for s in self.scheduler._waiting
        )

    @staticmethod
    def shared_pages(replica: Any) -> set[int]:
        return {page for page, references in replica.allocator._references.items() if references > 1}

    def check_pages(self) -> None:
        """Exactly what the sequences in slots hold is taken."""
        capacity = self.scheduler.capacity
        for replica in self.scheduler._replicas:
            held = [page for s in replica.slots if s is not None for page in s.pages]
            assert {page: held.count(page) for page in held} == replica.allocator._references
            assert replica.allocator.num_free == capacity.pages - 1 - len(set(held))
            assert set(replica._prefixes._keys) <= set(held), "prefixes of free pages are listed"
            assert all(s in replica.slots for s in replica._queue)
            assert all(s in replica.slots for same in replica._tails.values() for s in same)
            for source, target in replica._page_copies:
                assert source in replica.slots and target in replica.slots and target not in replica._queue
                assert source.request.prompt_tokens[:-1] == target.request.prompt_tokens[:-1]
            for sequence in replica.slots:
                if sequence is not None:
                    assert sequence.finish_reason is None
                    assert len(sequence.pages) == pages_of(sequence.request, capacity.page_size)

    def check_completion(self, completion: Completion) -> None:
        tokens, reason = answer(self.requests[completion.prompt_id], completion.generation_id)
        name = (completion.prompt_id, completion.generation_id)
        if completion.finish_reason in (FinishReason.CANCELLED, FinishReason.BUDGET):
            assert completion.tokens == tokens[: len(completion.tokens)], name
        else:
            assert (completion.tokens, completion.finish_reason) == (tokens, reason), name
        one = self.requests[completion.prompt_id]
        if completion.prompt_logprobs or completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert completion.prompt_logprobs == (scores_alone(one) if one.params.prompt_logprobs else ())
        assert len(completion.logprobs) == len(completion.sampled_logprobs) == len(completion.tokens)


@st.composite
def cases_with_stops(draw: st.DrawFn) -> tuple[Capacity, list[Request]]:
    capacity, requests = draw(cases())
    stops = st.lists(st.text("abcdefg", min_size=1, max_size=3), max_size=2).map(tuple)
    return capacity, [dataclasses.replace(r, params=dataclasses.replace(r.params, stop=draw(stops))) for r in requests]


@st.composite
def cases_with_copies(draw: st.DrawFn) -> tuple[Capacity, list[Request]]:
    """A prompt that ends within a page, several times, prefilled in several launches: copies are due for long."""
    page_size, slots = draw(st.sampled_from([2, 4])), draw(st.integers(2, 4))
    length = page_size * draw(st.integers(1, 3)) + 1 + draw(st.integers(1, page_size - 1))
    requests = [
        request(
            number,
            (*range(length), *([number] * page_size * draw(st.integers(0, 1)))),
            draw(st.integers(1, 6)),
            draw(st.integers(1, 4)),
            seed=number,
            temperature=0.5,
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    largest = max(pages_of(r, page_size) for r in requests)
    capacity = capacity_of(
        replicas=2,
        idle_replicas=draw(st.integers(0, 1)),
        sequences=slots,
        slots=slots,
        page_size=page_size,
        pages=1 + largest * draw(st.integers(2, 4)),
        pages_per_sequence=largest + 1,
        prefill_rows=draw(st.integers(1, 2)),
        steps=draw(st.integers(1, 3)),
        page_copies=1,
    )
    return capacity, requests


class Endings(RuleBasedStateMachine):
    """Launches, cancels and at most one end of time, in any order."""

    @initialize(
        case=cases_with_stops() | cases_with_copies(),
        share=st.integers(0, 4),
        max_prompts=st.none() | st.integers(1, 4),
    )
    def start(self, case: tuple[Capacity, list[Request]], share: int, max_prompts: int | None) -> None:
        self.run = Run(*case, share_prefixes=share > 0, max_prompts=max_prompts)
        self.cancelled: set[tuple[int, int]] = set()

    @rule()
    def launch(self) -> None:
        self.run.launch()

    @precondition(lambda self: self.run.scheduler.unfinished())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        copies = [pair for replica in self.run.scheduler._replicas for pair in replica._page_copies]
        due = [(s.request.prompt_id, s.generation_id) for pair in copies for s in pair]  # these more likely than others
        name = data.draw(st.sampled_from([*due * 3, *self.run.scheduler.unfinished()]))
        self.run.see("cancelled", name)
        before = self.run.scheduler.tokens_so_far(*name)
        self.run.scheduler.cancel(*name)
        self.cancelled.add(name)
        assert self.run.scheduler.tokens_so_far(*name) == before
        assert name not in self.run.scheduler.unfinished()

    @rule(share=st.integers(0, 19))
    def time_is_over(self, share: int) -> None:
        copies_are_due = any(replica._page_copies for replica in self.run.scheduler._replicas)
        if share < (8 if copies_are_due else 1):
            self.run.see("out of time")
            self.run.scheduler.abort(FinishReason.BUDGET)
            assert self.run.scheduler.done and self.run.scheduler.unfinished() == []

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if hasattr(self, "run"):
            self.run.check_pages()

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        while self.run.launch():
            self.run.check_pages()
        completions = self.run.scheduler.completions()
        assert [(c.prompt_id, c.generation_id) for c in completions] == [
            (number, g) for number, r in self.run.requests.items() for g in range(r.params.n_generations)
        ]
        for completion in completions:
            self.run.check_completion(completion)
            cancelled = (completion.prompt_id, completion.generation_id) in self.cancelled
            assert cancelled == (completion.finish_reason is FinishReason.CANCELLED)
        for replica in self.run.scheduler._replicas:
            assert replica.allocator.num_free == self.run.scheduler.capacity.pages - 1, "pages leak"


@pytest.mark.parametrize("examples", [60, pytest.param(300, marks=pytest.mark.nightly)])
def test_any_order_of_endings(examples: int) -> None:
    SEEN.clear()
    how = settings(max_examples=examples, stateful_step_count=25)
    run_state_machine_as_test(Endings, settings=how)
    if examples < 300:
        return  # too few to come by every state
    states = ("copied from", "copied to", "prefilling", "sharing pages", "waiting")
    wanted = [f"{what} {state}" for what in ("cancelled", "out of time") for state in states]
    wanted += ["PrefillBatch", "CopyPagesBatch", "PromptLogprobsBatch", "DecodeBatch"]
    assert not [each for each in wanted if not SEEN[each]], SEEN


@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.nightly)])
def test_stop_strings_end_answers_whatever_the_launches(examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases_with_stops())
    def drawn(case: tuple[Capacity, list[Request]]) -> None:
        capacity, requests = case
        for steps in {1, capacity.steps, 7}:
            run = Run(dataclasses.replace(capacity, steps=steps), requests)
            while run.launch():
                pass
            for completion in run.scheduler.completions():
                run.check_completion(completion)

    drawn()


def test_a_writer_that_leaves_has_the_sharers_write_its_pages() -> None:
    requests = [request(0, 12, 2), request(1, (*range(8), 9, 9), 2), request(2, 12, 2, generations=2)]
    run = Run(capacity_of(prefill_rows=1, pages=40), requests)
    assert run.launch()  # one page of prompt 0, admitted with all others
    run.scheduler.cancel(0, 0)
    run.check_pages()
    while run.launch():
        pass
    cancelled, *others = run.scheduler.completions()
    assert (cancelled.tokens, cancelled.finish_reason) == ((), FinishReason.CANCELLED)
    for completion in others:
        run.check_completion(completion)


def test_a_free_slot_is_used_at_the_next_launch() -> None:
    run = Run(capacity_of(slots=1, sequences=1), [request(0, 1, 8), request(1, 1, 2)])
    run.launch()
    run.scheduler.cancel(0, 0)
    run.launch()
    first, second = run.scheduler.completions()
    assert 0 < len(first.tokens) < 8 and second.finish_reason is FinishReason.LENGTH


def test_cancelling_twice_is_cancelling_once_and_strangers_are_refused() -> None:
    scheduler = Scheduler(capacity_of(), [request(3, 1, 2)])
    scheduler.cancel(3, 0)
    scheduler.cancel(3, 0)
    assert scheduler.next_batch() is None
    with pytest.raises(ConfigError, match="prompt 4 generation 0 is not among the 1 sequences of this run"):
        scheduler.cancel(4, 0)


def test_out_of_time_before_the_first_launch() -> None:
    scheduler = Scheduler(capacity_of(), [request(0, 5, 2), request(1, 5, 2, generations=9)])
    scheduler.abort(FinishReason.BUDGET)
    assert scheduler.next_batch() is None
    assert {(c.tokens, c.finish_reason) for c in scheduler.completions()} == {((), FinishReason.BUDGET)}


def test_stop_strings_need_a_finder() -> None:
    with pytest.raises(ConfigError, match=r"prompt 7 has the stop strings \['x'\]; .* find_stop=lockstep.StopFinder"):
        Scheduler(capacity_of(), [request(7, 1, 2, stop=("x",))])


def test_an_abort_ends_requests_that_were_not_read_yet_too() -> None:
    scheduler = Scheduler(capacity_of(), (request(i, 2, 3) for i in range(9)), max_prompts=1)
    assert scheduler.next_batch() is not None and len(scheduler._sequences) < 9
    scheduler.abort(FinishReason.BUDGET)
    assert scheduler.done and scheduler.next_batch() is None
    assert [(c.prompt_id, c.finish_reason) for c in scheduler.completions()] == [
        (i, FinishReason.BUDGET) for i in range(9)
    ]
    assert len(scheduler.take_answered()) == 9, "no answer is still to come"
