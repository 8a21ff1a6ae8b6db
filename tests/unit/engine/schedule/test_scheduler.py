import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import Capacity, CopyPagesBatch, DecodeBatch, PrefillBatch, PromptLogprobsBatch, Scheduler
from lockstep.types import FinishReason, Request, SamplingParams
from tests.unit.engine.schedule.fake_device import (
    ROUTED,
    VOCAB,
    FakeDevice,
    answer_alone,
    play,
    routed_alone,
    scores_alone,
)
from tests.unit.engine.schedule.placements import fits


def request(number: int, prompt: int | tuple[int, ...], new: int, generations: int = 1, **options) -> Request:
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_new_tokens=new, n_generations=generations, **options)
    return Request(prompt_id=number, prompt_tokens=tokens, params=params)


def capacity_of(**values: int) -> Capacity:
    default = {"replicas": 1, "sequences": 4, "slots": 4, "page_size": 2, "pages": 40, "pages_per_sequence": 8}
    default |= {"prefill_rows": 4, "steps": 4, "stop_ids": 2}
    return Capacity(**{**default, **values})


def pages_of(one: Request, page_size: int) -> int:
    """Positions that can be written: all but the last sampled token's."""
    return -(-(len(one.prompt_tokens) + one.params.max_new_tokens - 1) // page_size)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Capacity, list[Request]]:
    """Few slots, few pages, prompts that share beginnings."""
    page_size, routed = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    requests = [
        request(
            number,
            tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))),
            draw(st.integers(1, 8)),
            draw(st.integers(1, 3)),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
            seed=draw(st.integers(0, 2**32 - 1)),
            temperature=draw(st.sampled_from([0.0, 0.5])),
            prompt_logprobs=draw(st.booleans()),
            routed_experts=routed and draw(st.booleans()),
        )
        for number in draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6, unique=True))
    ]
    active, parts, slots = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    largest = max(pages_of(r, page_size) for r in requests)
    longest = max(len(r.prompt_tokens) + r.params.max_new_tokens for r in requests)
    capacity = Capacity(
        replicas=active * parts,
        idle_replicas=active * (parts - 1),
        sequences=draw(st.integers(1, active * slots)),
        slots=slots,
        page_size=page_size,
        pages=1 + largest + draw(st.integers(0, 2 * largest)),
        pages_per_sequence=-(-longest // page_size) + draw(st.integers(0, 2)),
        prefill_rows=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 5)),
        stop_ids=2,
        page_copies=draw(st.integers(0, 1)),
        prefill_sequences=draw(st.integers(0, 2)),
        prompt_logprobs=1,
        routed_experts=int(routed),
    )
    return capacity, requests


class Checks:
    """What must hold after every batch."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def __call__(self) -> None:
        scheduler, capacity = self.scheduler, self.scheduler.capacity
        assert scheduler._max_prompts is None or len(scheduler._unanswered) <= scheduler._max_prompts
        admitted = [sequence.replica >= 0 for sequence in scheduler._sequences]
        assert admitted == sorted(admitted, reverse=True), "somebody overtook"
        active = [[s for s in replica.slots if s is not None] for replica in scheduler._replicas]
        assert sum(len(each) for each in active) <= capacity.sequences
        for replica, live in zip(scheduler._replicas, active, strict=True):
            references = replica.allocator._references
            held = [page for sequence in live for page in sequence.pages]
            assert {page: held.count(page) for page in held} == references
            assert replica.allocator.num_free == capacity.pages - 1 - len(references)
            for i, a in enumerate(live):
                assert len(a.pages) == pages_of(a.request, capacity.page_size)
                for b in live[:i]:
                    self.check_shared(a, b, capacity.page_size)
        more = scheduler._admits_more  # while the devices prefill; `AtOnce` never has more to admit
        if scheduler._waiting and not more and sum(len(each) for each in active) < capacity.sequences:
            head = scheduler._waiting[0]
            assert not any(fits(replica, head) for replica in scheduler._replicas), "something fits and waits"

    @staticmethod
    def check_shared(a, b, page_size: int) -> None:
        for page in set(a.pages) & set(b.pages):
            index = a.pages.index(page)
            assert b.pages.index(page) == index
            end = (index + 1) * page_size
            assert end < min(len(a.request.prompt_tokens), len(b.request.prompt_tokens)), "not a full prompt page"
            assert a.request.prompt_tokens[:end] == b.request.prompt_tokens[:end], "not a common prefix"


@pytest.mark.parametrize("examples", [30, pytest.param(200, marks=pytest.mark.nightly)])
def test_everything_is_answered_as_if_it_were_alone(examples: int) -> None:
    drawn = given(cases(), st.none() | st.integers(1, 4), st.booleans())(answered_as_if_alone)
    settings(max_examples=examples)(drawn)()


def answered_as_if_alone(case: tuple[Capacity, list[Request]], max_prompts: int | None, one_by_one: bool) -> None:
    capacity, requests = case
    routed = ROUTED if capacity.routed_experts else None
    scheduler = Scheduler(capacity, iter(requests) if one_by_one else requests, max_prompts=max_prompts, routed=routed)
    played = play(scheduler, Checks(scheduler))

    expected = [(r, g) for r in requests for g in range(r.params.n_generations)]
    assert [(c.prompt_id, c.generation_id) for c in played.completions] == [(r.prompt_id, g) for r, g in expected]
    for completion, (one, generation) in zip(played.completions, expected, strict=True):
        assert (completion.tokens, completion.finish_reason) == answer_alone(one, generation)
        assert completion.prompt_logprobs == (scores_alone(one) if one.params.prompt_logprobs else ())
        assert completion.logprobs == tuple(-0.5 * token for token in completion.tokens)
        assert (completion.routed_experts is not None) == one.params.routed_experts
        if completion.routed_experts is not None:
            words = np.frombuffer(completion.routed_experts.packed, np.int32)
            assert words.tolist() == routed_alone(one, completion.tokens)

    for replica in scheduler._replicas:
        assert replica.allocator.num_free == capacity.pages - 1, "pages leak"
        assert not replica.busy and not replica.prefilling
        assert not replica._prefixes._pages and not replica._prefixes._keys, "prefixes of free pages are listed"
    tokens = sum(len(c.tokens) for c in played.completions)
    counts = scheduler.counts
    assert (counts.finished, sum(counts.tokens), counts.pages) == (len(expected), tokens, 0)
    rows = 2 * sum(-(-(len(r.prompt_tokens) - 1) // capacity.page_size) for r, _ in expected)
    assert len(played.batches) <= tokens + rows, "a launch that gets nowhere"


class AtOnce(Scheduler):
    """Admits all that fit before each launch."""

    def _admit(self, *, all_that_fit: bool = False) -> None:
        super()._admit(all_that_fit=True)


@settings(max_examples=40)
@given(cases(), st.none() | st.integers(1, 4), st.lists(st.integers(0, 9), max_size=12))
def test_who_is_admitted_while_devices_prefill_goes_where_it_would_have_gone_before(
    case: tuple[Capacity, list[Request]], max_prompts: int | None, cancels: list[int]
) -> None:
    ours, at_once = (kind(case[0], case[1], max_prompts=max_prompts) for kind in (Scheduler, AtOnce))
    devices, check = (FakeDevice(case[0]), FakeDevice(case[0])), Checks(at_once)
    while (batch := ours.next_batch()) is not None:
        expected = at_once.next_batch()
        if not any(s.finish_reason is FinishReason.CANCELLED for s in at_once._sequences):
            check()
        assert type(batch) is type(expected)
        for left, right in zip(arrays_of(batch).values(), arrays_of(expected).values(), strict=True):
            np.testing.assert_array_equal(left, right)
        for device, scheduler in zip(devices, (ours, at_once), strict=True):
            device.launch(scheduler, batch)
        if cancels and (live := ours.unfinished()) and (chosen := cancels.pop()) < len(live):
            ours.cancel(*live[chosen])
            at_once.cancel(*live[chosen])
    assert at_once.next_batch() is None and ours.completions() == at_once.completions()


def first_batch(replicas: int, slots: int) -> tuple[Scheduler, int]:
    """A scheduler that has returned its first batch of prompts of two pages, and the calls of functions it took."""
    capacity = capacity_of(replicas=replicas, slots=slots, sequences=replicas * slots, pages=1 + 4 * slots)
    requests = [request(number, (number, *range(3)), 4) for number in range(replicas * slots)]
    scheduler, calls = Scheduler(capacity, requests), 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    batch = scheduler.next_batch()
    sys.setprofile(None)
    assert isinstance(batch, PrefillBatch) and (batch.page > 0).all()
    return scheduler, calls


def test_a_first_batch_costs_as_much_per_row_on_many_replicas_and_slots_as_on_few() -> None:
    """A scan of all replicas for each admission took 4.1 s at 256 replicas of 64 slots."""
    calls = {shape: first_batch(*shape)[1] for shape in ((8, 8), (64, 8), (8, 64))}
    assert calls[64, 8] < 1.1 * 8 * calls[8, 8] and calls[8, 64] < 1.1 * calls[8, 8], calls
    scheduler, _ = first_batch(16, 32)
    assert scheduler._num_active == 16 * 4, "the others are admitted while the devices prefill the first rows"
    assert scheduler.next_batch() is not None and scheduler._num_active == 16 * 6, "to the rows that are left"


@settings(max_examples=100)
@given(cases(), st.booleans())
def test_what_prompts_have_in_common_is_prefilled_once(case: tuple[Capacity, list[Request]], share: bool) -> None:
    capacity, requests = case
    total = sum(r.params.n_generations for r in requests)
    pages = sum(r.params.n_generations * pages_of(r, capacity.page_size) for r in requests)
    roomy = dataclasses.replace(
        capacity, replicas=1, idle_replicas=0, slots=total, sequences=total, pages=pages + 1, page_copies=1
    )
    scheduler = Scheduler(roomy, requests, share_prefixes=share)
    played = play(scheduler, Checks(scheduler))
    size = capacity.page_size
    scored = [-(-(len(r.prompt_tokens) - 1) // size) for r in requests if r.params.prompt_logprobs]
    rows_scored = [int((p.targets[..., 0] >= 0).sum()) for p in played.batches if isinstance(p, PromptLogprobsBatch)]
    assert sum(rows_scored) == sum(scored), "a prompt is scored once, whatever its generations"
    # A row writes one page: of all prompts, each different beginning of whole pages, and each different prompt that
    # ends on a partial one.
    rows, copies = [], 0
    for r in requests:
        known, generations = r.prompt_tokens[:-1], r.params.n_generations
        own = [known[: (i + 1) * size] for i in range(-(-len(known) // size))]
        rows += own * (1 if share else generations)
    if share:
        copies = sum(r.params.n_generations for r in requests if (len(r.prompt_tokens) - 1) % size)
        copies -= len({row for row in rows if len(row) % size})
        rows = list(set(rows))
    assert sum(int((p.page != 0).sum()) for p in played.batches if isinstance(p, PrefillBatch)) == len(rows)
    assert sum(int((p.target != 0).sum()) for p in played.batches if isinstance(p, CopyPagesBatch)) == copies
    for completion, (one, generation) in zip(
        played.completions, [(r, g) for r in requests for g in range(r.params.n_generations)], strict=True
    ):
        assert (completion.tokens, completion.finish_reason) == answer_alone(one, generation)


def test_prompts_are_read_as_others_are_answered_and_answers_leave_whole() -> None:
    every = [request(n, (n % 3, 1, 2), 1 + n % 4, generations=2) for n in range(40)]
    read: list[int] = []

    def source():
        for one in every:
            read.append(one.prompt_id)
            yield one

    scheduler = Scheduler(capacity_of(page_copies=1), source(), max_prompts=5)
    device, taken = FakeDevice(scheduler.capacity), []
    while (batch := scheduler.next_batch()) is not None:
        device.launch(scheduler, batch)
        for completion in scheduler.take_answered():
            taken.append((completion.prompt_id, completion.generation_id))
            one = every[completion.prompt_id]
            assert completion.tokens == answer_alone(one, completion.generation_id)[0]
        # One more is known than is in slots, so that the end is seen before it is reached.
        assert len(read) <= len({number for number, _ in taken}) + 5 + 1
        assert len(scheduler._sequences) <= 2 * 5
    assert sorted(taken) == [(number, g) for number in range(40) for g in range(2)]
    assert scheduler.counts.finished == len(taken), "those that left count too"
    assert scheduler.completions() == []


def test_a_generation_that_comes_later_copies_from_one_that_is_there() -> None:
    one = request(0, 7, 5, generations=3)
    scheduler = Scheduler(capacity_of(page_size=4, slots=2, sequences=2, page_copies=1), [one])
    device, kinds = FakeDevice(scheduler.capacity), []
    while (batch := scheduler.next_batch()) is not None:
        device.launch(scheduler, batch)
        kinds.append(type(batch))
        if isinstance(batch, DecodeBatch):
            scheduler.cancel(0, 0)  # its slot is free, its neighbour decodes on
    assert (
        kinds[:5] == [PrefillBatch, CopyPagesBatch, DecodeBatch, CopyPagesBatch, DecodeBatch]
        and kinds.count(PrefillBatch) == 1
    )
    assert [c.tokens for c in scheduler.completions()[1:]] == [answer_alone(one, g)[0] for g in (1, 2)]


def test_all_generations_go_where_their_prompt_is_while_others_wait() -> None:
    capacity = capacity_of(replicas=2, slots=4, sequences=8, page_copies=1)
    many = Scheduler(capacity, [request(i, (i, 1, 2, 3), 4, generations=4) for i in range(4)])
    many.next_batch()
    assert [[s.request.prompt_id for s in replica.slots] for replica in many._replicas] == [[0] * 4, [1] * 4]
    few = Scheduler(capacity, [request(0, 4, 4, generations=4)])
    few.next_batch()
    assert [sum(s is not None for s in replica.slots) for replica in few._replicas] == [2, 2]


@settings(max_examples=60)
@given(cases())
def test_batches_are_a_pure_function_of_fixed_shapes(case: tuple[Capacity, list[Request]]) -> None:
    capacity, requests = case
    first, second = (play(Scheduler(capacity, list(requests))) for _ in range(2))
    assert len(first.batches) == len(second.batches)
    shapes = {
        PrefillBatch: PrefillBatch.empty(capacity),
        CopyPagesBatch: CopyPagesBatch.empty(capacity),
        PromptLogprobsBatch: PromptLogprobsBatch.empty(capacity),
        DecodeBatch: DecodeBatch.empty(capacity, 0),
    }
    for a, b in zip(first.batches, second.batches, strict=True):
        assert type(a) is type(b)
        left, right, empty = arrays_of(a), arrays_of(b), arrays_of(shapes[type(a)])
        assert left.keys() == right.keys() == empty.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
            assert (left[name].shape, left[name].dtype) == (empty[name].shape, empty[name].dtype)


def arrays_of(batch: PrefillBatch | CopyPagesBatch | PromptLogprobsBatch | DecodeBatch) -> dict[str, np.ndarray]:
    """Every number of a batch, by name."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    sampling = values.pop("sampling").arrays() if isinstance(batch, DecodeBatch) else {}
    return {name: np.asarray(value) for name, value in {**values, **sampling}.items()}


def test_generations_of_a_prompt_share_its_full_pages_and_prefill_them_once() -> None:
    scheduler = Scheduler(capacity_of(), [request(0, 8, 4, generations=3)])
    batch = scheduler.next_batch()
    assert isinstance(batch, PrefillBatch)
    first, second, third = (s.pages for s in scheduler._replicas[0].slots[:3])
    assert first[:3] == second[:3] == third[:3], "positions 0 to 5 are on shared pages"
    assert len({*first[3:], *second[3:], *third[3:]}) == 9, "the page of the last prompt token is everybody's own"
    # 3 shared pages and position 6, which each prefills on its own page.
    rows = [int((p.page != 0).sum()) for p in play(scheduler).batches if isinstance(p, PrefillBatch)]
    assert int((batch.page != 0).sum()) + sum(rows) == 3 + 3


def test_waiting_sequences_get_a_slot_as_soon_as_one_is_free() -> None:
    capacity = capacity_of(slots=2, sequences=2, steps=16, pages=80, pages_per_sequence=40)
    scheduler = Scheduler(capacity, [request(0, 1, 26), request(1, 1, 10), request(2, 1, 16)])
    played = play(scheduler)
    assert [p.num_steps for p in played.batches] == [10, 16], "while one waits, a launch may end with the shortest"
    assert played.most_active == 2


def test_sequences_spread_over_replicas_and_never_more_than_asked() -> None:
    scheduler = Scheduler(capacity_of(replicas=3, slots=2, sequences=4), [request(i, 1, 2) for i in range(7)])
    batch = scheduler.next_batch()
    assert isinstance(batch, DecodeBatch)
    assert (batch.remaining > 0).sum(axis=1).tolist() == [2, 1, 1]


def test_fewer_sequences_than_replicas() -> None:
    requests = [request(i, 3, 2) for i in range(5)]
    played = play(Scheduler(capacity_of(replicas=4, slots=1, sequences=2), requests))
    assert played.most_active == 2
    assert [c.tokens for c in played.completions] == [answer_alone(r, 0)[0] for r in requests]


def test_a_large_request_at_the_head_is_not_starved_by_small_ones_behind_it() -> None:
    small = [request(i, 2, 3) for i in range(1, 12)]
    scheduler = Scheduler(capacity_of(pages=9, slots=3, sequences=3), [small[0], request(99, 12, 4), *small[1:]])
    admitted = []

    def watch() -> None:
        admitted.extend(s.request.prompt_id for s in scheduler._sequences if s.replica >= 0)

    play(scheduler, watch)
    order = list(dict.fromkeys(admitted))
    assert order == [1, 99, *range(2, 12)]


@pytest.mark.parametrize(("cap", "launches"), [(0, [{0, 1, 2}]), (1, [{0}, {1}, {2}]), (2, [{0, 1}, {2}])])
def test_a_launch_prefills_the_prompts_of_no_more_sequences_than_allowed(cap, launches):
    scheduler = Scheduler(
        capacity_of(prefill_rows=12, prefill_sequences=cap), [request(i, tuple([i] * 6), 2) for i in range(3)]
    )
    seen = []
    while isinstance(batch := scheduler.next_batch(), PrefillBatch):
        used = batch.page[0] > 0
        seen.append(set(batch.tokens[0][used][:, 0].tolist()))
    assert seen == launches


def test_the_stop_rate_is_of_the_answers_that_stopped() -> None:
    """It decides how long launches are while others wait; an answer that reached its length did not stop."""
    stopping, whole = request(0, 1, 8), request(1, 1, 4)
    tokens, _ = answer_alone(stopping, 0)
    stopping = request(0, 1, 8, stop_token_ids=(tokens[0],))
    scheduler = Scheduler(capacity_of(steps=4), [stopping, whole])
    play(scheduler)
    assert scheduler._stop_rate == (1 + 1) / (1 + 4 + 4)


def test_finished_answers_are_made_while_the_devices_work_on_the_others() -> None:
    scheduler = Scheduler(capacity_of(steps=2), [request(0, 1, 2), request(1, 1, 8)])
    made = []

    def note() -> None:
        made.append([sequence._completion is not None for sequence in scheduler._sequences])

    play(scheduler, note)
    assert made[-1] == [True, False]
