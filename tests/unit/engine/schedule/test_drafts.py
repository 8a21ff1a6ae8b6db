"""What is guessed, and when a guess is worth verifying; the device is one in plain Python."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import Capacity, Scheduler, VerifyBatch
from lockstep.engine.schedule.drafts import _FIRST, _GROWTH, Drafter, Proposer
from lockstep.engine.schedule.ngrams import Ngrams
from lockstep.types import Drafts, Request, SamplingParams
from tests.unit.engine.schedule.fake_device import Played, answer_alone, play

CAPACITY = Capacity(
    replicas=2, sequences=4, slots=2, page_size=4, pages=40, pages_per_sequence=20, prefill_rows=4, steps=16,
    stop_ids=4, draft_tokens=64,
)  # fmt: skip
CHEAP = {8: 2.0, 64: 5.0}


def request(number: int, drafts: Drafts | None, new: int = 64, **params: object) -> Request:
    params = {"max_new_tokens": new, "temperature": 1.0, "seed": 5, **params}
    return Request(prompt_id=number, prompt_tokens=(1, 2, number), params=SamplingParams(**params), drafts=drafts)


def proposer(answer: tuple[int, ...] = (), *, prompt: tuple[int, ...] = (0,), ngrams: bool = False) -> Proposer:
    return Proposer(Drafts(answers=(answer,)), 0, Ngrams(prompt, 1) if ngrams else None)


@pytest.mark.parametrize(
    ("answer", "guess"),
    [
        ((), range(10, 15)),
        (range(10, 18), range(18, 23)),
        ((*range(10, 14), 99), range(15, 20)),  # replaced
        ((*range(10, 14), 99, 15, 16), range(17, 22)),
        ((*range(10, 14), *range(16, 30)), range(30, 35)),  # two left out
        ((*range(10, 14), 97, 98, 99, *range(14, 30)), range(30, 35)),  # three more
        ((*range(10, 48),), (48, 49)),  # no further than it reaches
        ((*range(10, 50), 7), ()),
    ],
)
def test_a_draft_goes_on_where_the_answer_is(answer, guess):
    assert proposer(tuple(range(10, 50))).propose(list(answer), 5).tolist() == list(guess)


def test_a_draft_goes_on_from_where_it_was_found_before_where_it_repeats_itself():
    draft = (1, 2, 2, 0, 0, 0, 0, 2, 1)
    answer = [1, 97, 97, *draft[1:]]  # two tokens more than the draft
    one = proposer(draft)
    guesses = [one.propose(answer[:length], 2).tolist() for length in range(1, 9)]
    assert guesses[-1] == answer[8:10]


def test_what_is_looked_up_is_not_the_draft_s_where_that_is_right():
    both = proposer((4, 5, 6, 7), prompt=(4, 5, 9), ngrams=True)
    both.add([4, 5])
    assert both.propose([4, 5], 2).tolist() == [6, 7]
    both.add([8, 4, 5])
    assert both.propose([4, 5, 8, 4, 5], 3).tolist() == [8, 4, 5]


def wrong(answer: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((token + 1) % 7 for token in answer)


def test_right_drafts_are_verified_in_ever_larger_chunks_and_wrong_ones_once():
    answers = [answer_alone(request(i, None), 0)[0] for i in range(4)]
    right = play(Scheduler(CAPACITY, [request(i, Drafts(answers=(answers[i],))) for i in range(4)], verify_costs=CHEAP))
    assert [c.tokens for c in right.completions] == answers
    verified = [batch for batch in right.batches if isinstance(batch, VerifyBatch)]
    assert [(batch.width, batch.decode.num_steps) for batch in verified] == [(8, 1), (64, 1)]
    assert not right.decoded

    bad = play(
        Scheduler(CAPACITY, [request(i, Drafts(answers=(wrong(answers[i]),))) for i in range(4)], verify_costs=CHEAP)
    )
    assert [c.tokens for c in bad.completions] == answers
    verified = [batch for batch in bad.batches if isinstance(batch, VerifyBatch)]
    assert [batch.decode.num_steps for batch in verified] == [1], "drafts that prove wrong are left alone"

    # Who comes next learns from it: nothing is verified for them.
    many = [request(i, Drafts(answers=(wrong(answer_alone(request(i, None), 0)[0]),))) for i in range(12)]
    later = play(Scheduler(CAPACITY, many, verify_costs=CHEAP))
    assert sum(isinstance(batch, VerifyBatch) for batch in later.batches) == 1


@pytest.mark.parametrize(
    ("compared", "right", "first"), [(64, 64, (64, 1)), (8, 8, (8, 5)), (0, 0, (8, 1)), (64, 40, (8, 8)), (64, 6, None)]
)
def test_what_came_of_the_last_drafts_decides_the_first_launch(compared, right, first):
    answer = answer_alone(request(0, None), 0)[0]
    drafts = Drafts(answers=(answer,), compared=compared, right=right)
    played = play(Scheduler(CAPACITY, [request(0, drafts)], verify_costs={8: 2.0, 64: 9.0}))
    batch = played.batches[-played.launches]
    assert ((batch.width, batch.decode.num_steps) if isinstance(batch, VerifyBatch) else None) == first
    assert played.completions[0].tokens == answer


def test_a_short_answer_is_not_put_at_risk():
    """Drafts of which nothing is known waste no more than a few percent of the steps, were all of them wrong."""
    for new, tried in ((24, False), (25, True)):
        answer = answer_alone(request(0, None, new), 0)[0]
        for known in (0, 8):
            drafts = Drafts(answers=(answer,), compared=known, right=known)
            played = play(Scheduler(CAPACITY, [request(0, drafts, new)], verify_costs={8: 2.0, 64: 9.0}))
            verified = isinstance(played.batches[-played.launches], VerifyBatch)
            assert verified is (tried or known > 0), (new, known)


def test_a_draft_shorter_than_a_step_is_known_as_far_as_it_goes():
    answer = answer_alone(request(0, None, 6), 0)[0]
    for known, verified in ((0, False), (len(answer), True)):
        drafts = Drafts(answers=(answer,), compared=known, right=known)
        played = play(Scheduler(CAPACITY, [request(0, drafts, 6)], verify_costs={8: 2.0, 64: 9.0}))
        assert isinstance(played.batches[-played.launches], VerifyBatch) is verified
        assert played.completions[0].tokens == answer


def test_drafts_that_come_right_are_verified_again():
    answer = answer_alone(request(0, None), 0)[0]
    draft = (*wrong(answer[:8]), *answer[8:])
    played = play(Scheduler(CAPACITY, [request(0, Drafts(answers=(draft,)))], verify_costs=CHEAP))
    kinds = [isinstance(batch, VerifyBatch) for batch in played.batches[-played.launches :]]
    assert played.completions[0].tokens == answer
    assert kinds[0] and not kinds[1] and kinds[-1], "tried, left alone, and taken up again"


def test_where_steps_cost_what_their_positions_do_nothing_is_verified():
    answer = answer_alone(request(0, None), 0)[0]
    played = play(Scheduler(CAPACITY, [request(0, Drafts(answers=(answer,)))], verify_costs={8: 8.0, 64: 64.0}))
    assert not any(isinstance(batch, VerifyBatch) for batch in played.batches)
    assert played.completions[0].tokens == answer


ROOMY = dataclasses.replace(CAPACITY, replicas=1, sequences=8, slots=8, pages=400, pages_per_sequence=44)


def steps_of(played: Played, costs: dict[int, float]) -> float:
    """The time of all launches, in decode steps."""
    verified = sum(b.decode.num_steps * costs[b.width] for b in played.batches if isinstance(b, VerifyBatch))
    return verified + sum(batch.num_steps for batch in played.decoded)


@pytest.mark.parametrize("costs", [{8: 1.3, 64: 4.0}, {8: 2.0, 64: 9.0}])
@pytest.mark.parametrize("right", range(9))
def test_right_drafts_hold_up_no_others(right, costs):
    """A round lasts as long as its slowest sequence: verifying the right drafts of some must not slow down the rest."""
    new = 160
    answers = [answer_alone(request(i, None, new), 0)[0] for i in range(8)]
    drafts = [
        Drafts(answers=(answer,), compared=64, right=64) if i < right
        else Drafts(answers=(wrong(answer),), compared=64, right=0)
        for i, answer in enumerate(answers)
    ]  # fmt: skip
    requests = [request(i, each, new) for i, each in enumerate(drafts)]
    played = play(Scheduler(ROOMY, requests, verify_costs=costs))
    assert [c.tokens for c in played.completions] == answers
    time = steps_of(played, costs)
    assert time <= new
    if right == 8:
        assert time < new / 5


def test_a_short_answer_with_wrong_drafts_does_not_keep_long_right_ones_from_being_verified():
    costs = {8: 2.0, 64: 9.0}
    answers = [answer_alone(request(i, None, 160 if i else 8), 0)[0] for i in range(8)]
    answers[0] = answers[0][:8]
    requests = [request(i, Drafts(answers=(a,), compared=64, right=64)) for i, a in enumerate(answers)]
    requests = [dataclasses.replace(r, params=dataclasses.replace(r.params, max_new_tokens=160)) for r in requests]
    stop = int(answer_alone(request(0, None, 8), 0)[0][-1])
    first = dataclasses.replace(requests[0].params, stop_token_ids=(stop,))
    end = answers[0].index(stop) + 1
    drafts = Drafts(answers=(wrong(answers[0][:end]),), compared=64, right=0)
    requests[0] = dataclasses.replace(requests[0], params=first, drafts=drafts)
    played = play(Scheduler(ROOMY, requests, verify_costs=costs))
    assert steps_of(played, costs) < 160 / 2


def test_while_others_wait_the_tokens_of_all_slots_count():
    capacity = dataclasses.replace(ROOMY, slots=4, sequences=4)
    costs, new = {8: 1.3, 64: 4.0}, 64
    answers = [answer_alone(request(i, None, new), 0)[0] for i in range(16)]
    drafts = [
        Drafts(answers=(wrong(a),), compared=64, right=0) if i % 4 == 0
        else Drafts(answers=(a,), compared=64, right=64)
        for i, a in enumerate(answers)
    ]  # fmt: skip
    requests = [request(i, each, new) for i, each in enumerate(drafts)]
    played = play(Scheduler(capacity, requests, verify_costs=costs))
    assert [c.tokens for c in played.completions] == answers
    plain = play(Scheduler(capacity, [request(i, None, new) for i in range(16)], verify_costs=costs))
    assert steps_of(played, costs) < steps_of(plain, costs) / 1.5


@pytest.mark.parametrize("drafted", [False, True])
def test_tokens_after_a_stop_string_count_for_nothing(drafted):
    """What a launch samples beyond a stop string is dropped: no step sampled it, and no guess of it was right."""
    alone = answer_alone(request(0, None), 0)[0]
    drafts = Drafts(answers=(alone,), compared=64, right=64) if drafted else Drafts()
    scheduler = Scheduler(
        CAPACITY, [request(0, drafts, stop=("x",))], lambda tokens, new, stop, prompt: 3 if len(tokens) >= 3 else None,
        verify_costs=CHEAP,
    )  # fmt: skip
    played = play(scheduler)
    assert played.completions[0].tokens == alone[:3]
    counts = scheduler.counts
    assert sum(counts.tokens) == 3
    assert (counts.steps, counts.drafted, counts.right) == ((1, 3, 3) if drafted else (3, 0, 0))


@settings(max_examples=60)
@given(data=st.data())
def test_any_draft_gives_the_same_tokens_and_counts(data):
    """More requests than slots, some without drafts, stops, answers of any length; costs that lead to each choice."""
    requests, drafted = [], []
    for number in range(data.draw(st.integers(1, 7))):
        params = {"new": data.draw(st.integers(1, 64)), "stop_token_ids": data.draw(st.sampled_from([(), (3,)]))}
        params["n_generations"] = data.draw(st.integers(1, 2))
        plain = request(number, None, **params)
        requests.append(plain)
        answers = []
        for generation in range(params["n_generations"]):
            known = answer_alone(plain, generation)[0]
            keep = data.draw(st.integers(0, len(known)))
            rest = data.draw(
                st.sampled_from([known[keep:], wrong(known[keep:]), known[keep + 1 :], (0, *known[keep:])])
            )
            answers.append((*known[:keep], *rest, *data.draw(st.sampled_from([(), (5,) * 30]))))
        ngrams = data.draw(st.booleans())
        drafts = data.draw(st.sampled_from([Drafts(answers=tuple(answers), ngrams=ngrams), None]))
        drafted.append(request(number, drafts, **params))
    costs = data.draw(st.sampled_from([CHEAP, {8: 1.0, 64: 60.0}, {8: 3.0, 64: 3.5}]))
    scheduler = Scheduler(CAPACITY, drafted, verify_costs=costs)
    played = play(scheduler)
    want = [answer_alone(each, generation) for each in requests for generation in range(each.params.n_generations)]
    assert [(c.tokens, c.finish_reason) for c in played.completions] == want
    counts = scheduler.counts
    assert sum(counts.tokens) == sum(len(tokens) for tokens, _ in want)
    assert counts.steps == played.steps <= sum(counts.tokens) and counts.right <= counts.drafted
    assert all(each.allocator.num_free == CAPACITY.pages - 1 for each in scheduler._replicas)


def test_a_launch_verifies_as_many_steps_as_is_known_of_those_with_drafts():
    """One sequence of three has a draft of 40 tokens, of which 16 were looked at; the others were never looked at."""
    drafter = Drafter(dataclasses.replace(ROOMY, slots=3, sequences=3), {8: 1.0, 64: 1.0})
    drafter.drafts[0, 1, :40] = 1
    remaining = np.array([[50, 50, 50]], np.int32)
    found = []
    for looked_at in (0.0, 16.0, 1000.0):
        drafter._looked_at[0, 1] = looked_at
        found.append(drafter.most_steps(8, [1.0, 4.0, 1.0], remaining))
    reach, most = 11, ROOMY.draft_tokens // 8
    assert found == [min(reach, int(_FIRST + _GROWTH * looked_at) // 8, most) for looked_at in (0.0, 16.0, 1000.0)]
