import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.schedule import Scheduler
from lockstep.engine.schedule.ngrams import Ngrams
from lockstep.types import Drafts
from tests.unit.engine.schedule.fake_device import FakeDevice
from tests.unit.engine.schedule.test_drafts import CAPACITY, CHEAP, request


def guess(prompt, *answers, count):
    """A guess for the last of the answers."""
    ngrams = Ngrams(prompt, len(answers))
    for generation, answer in enumerate(answers):
        ngrams.add(generation, answer)
    return ngrams.guess(len(answers) - 1, count)


@pytest.mark.parametrize(
    ("prompt", "answers", "expected"),
    [
        ((1, 2, 3, 4, 5), [(9, 2, 3)], (4, 5, 9)),  # the prompt goes on with the answer
        ((1,), [(7, 8, 9, 7, 8)], (9, 7, 8, 9, 7, 8, 9)),
        ((1,), [(4, 5, 6)], ()),
        ((1,), [()], ()),
        ((7, 8, 5, 7, 8, 6), [(7, 8)], (6, 7, 8)),  # the last place
        ((7, 8, 5, 1, 2, 3, 1), [(2, 3, 9, 7, 8, 6, 2, 3)], (9, 7, 8)),  # the answer before the prompt
        ((2, 3, 5, 9), [(1, 2, 3, 6, 1, 2, 3)], (6, 1, 2)),  # three tokens before two
        ((0,), [(7, 8, 9, 10), (7, 8)], (9, 10)),  # another answer, as far as it is
        ((1, 2, 3), [(7, 8, 9, 10), ()], (7, 8, 9)),  # and from its first token on
        ((1, 2, 3), [(7, 8), (7,)], (8,)),
    ],
)
def test_what_followed(prompt, answers, expected):
    assert tuple(guess(prompt, *answers, count=max(3, len(expected))))[: len(expected) or None] == expected


@given(st.lists(st.integers(0, 2), min_size=1), st.lists(st.integers(0, 2)), st.integers(1, 9))
def test_guesses_are_what_a_search_finds(prompt, answer, count):
    """The last place before the end where the last three tokens were, else the last two."""
    text = [*prompt[-3:], *answer]
    found = guess(prompt, answer, count=count)
    for size in (3, 2):
        if size > len(text):
            continue
        for where in (text, prompt):
            places = [p for p in range(size, len(where)) if where[p - size : p] == text[len(text) - size :]]
            if places:
                going_on = where[places[-1] :] if where is text else [*where[places[-1] :], *answer]
                assert found == (going_on * count)[:count]
                return
    assert found == []


def test_tokens_are_added_as_they_are_kept():
    """Also those of launches without drafts and of other generations, but none after a stop string."""
    one = request(0, Drafts(ngrams=True), n_generations=3, stop=("x",))
    scheduler = Scheduler(CAPACITY, [one], lambda tokens, *_: 20 if len(tokens) >= 20 else None, verify_costs=CHEAP)
    device = FakeDevice(CAPACITY)
    while (batch := scheduler.next_batch()) is not None:
        device.launch(scheduler, batch)
    (ngrams,) = {id(each.ngrams): each.ngrams for each in scheduler._sequences}.values()
    assert [text[3:] for text in ngrams._texts] == [list(each.tokens) for each in scheduler.completions()]
    assert {len(text) for text in ngrams._texts} == {23}
