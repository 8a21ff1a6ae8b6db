"""Earlier answers, kept as drafts."""

import json

import pytest

from lockstep.engine.drafts import EarlierAnswers
from lockstep.errors import ConfigError
from lockstep.types import Completion, Drafts, FinishReason


def completion(*tokens: int) -> Completion:
    return Completion(
        prompt_id=0, generation_id=0, tokens=tokens, logprobs=(0.0,) * len(tokens), finish_reason=FinishReason.STOP
    )


def test_the_last_answers_are_the_next_drafts():
    earlier = EarlierAnswers("auto")
    assert earlier.drafts("a") == Drafts(ngrams=True)
    earlier.keep("a", [completion(1, 2), completion()])
    earlier.keep("b", [completion(3)])
    earlier.keep("a", [completion(4), completion(5, 6)])
    assert earlier.drafts("a") == Drafts(answers=((4,), (5, 6)), ngrams=True, compared=1)
    assert earlier.drafts("b") == Drafts(answers=((3,),), ngrams=True)


def test_drafts_say_how_much_of_the_last_ones_was_right():
    earlier = EarlierAnswers("last_round")
    earlier.keep("a", [completion(1, 2, 3), completion(4, 5)])
    earlier.keep("a", [completion(1, 9, 3, 4), completion(4), completion(7)])
    assert earlier.drafts("a") == Drafts(answers=((1, 9, 3, 4), (4,), (7,)), compared=4, right=3)
    earlier.keep("a", [completion(), completion(8)])
    assert earlier.drafts("a") == Drafts(answers=((), (8,)), compared=1)


def test_each_source_by_itself():
    none, ngram, last = (EarlierAnswers(source) for source in ("none", "ngram", "last_round"))
    for each in (none, ngram, last):
        each.keep("a", [completion(1, 2)])
    assert none.drafts("a") is None
    assert ngram.drafts("a") == Drafts(ngrams=True)
    assert last.drafts("a") == Drafts(answers=((1, 2),))


def test_what_was_kept_longest_ago_goes_first():
    earlier = EarlierAnswers("last_round", max_tokens=5)
    for name in "abc":
        earlier.keep(name, [completion(1, 2)])
    assert [bool(earlier.drafts(name).answers) for name in "abc"] == [False, True, True]
    earlier.keep("b", [completion(7)])  # anew, and now the youngest
    earlier.keep("d", [completion(1, 2)])
    earlier.keep("e", [completion(1)])
    assert [bool(earlier.drafts(name).answers) for name in "abcde"] == [False, True, False, True, True]


def test_a_draft_of_what_are_no_tokens_is_refused():
    with pytest.raises(ConfigError, match="draft of generation 1 has tokens from -1 to 7; token ids are at least 0"):
        Drafts(answers=((), (7, -1)))


@pytest.mark.parametrize(("compared", "right"), [(3, 4), (0, 1), (-1, -1), (2, -1)])
def test_no_more_tokens_were_right_than_there_were(compared, right):
    with pytest.raises(ConfigError, match=f"of {compared} tokens of earlier drafts {right} are said to be right"):
        Drafts(compared=compared, right=right)


def test_what_is_kept_comes_back_from_a_checkpoint():
    earlier = EarlierAnswers("auto", max_tokens=9)
    for key, answers in (((3, (7, 8)), [(1, 2), ()]), ((3, (7, 8)), [(1, 5), (4,)]), (17, [(6, 70000)]), (18, [])):
        earlier.keep(key, [completion(*each) for each in answers])
    copy, state = earlier.copy(), json.loads(json.dumps(earlier.state()))
    resumed = EarlierAnswers("auto", max_tokens=9)
    resumed.load_state(state)
    for each in (earlier, copy, resumed):
        assert each.drafts((3, (7, 8))) == Drafts(answers=((1, 5), (4,)), ngrams=True, compared=2, right=1)
        assert each.drafts(17) == Drafts(answers=((6, 70000),), ngrams=True) and each.drafts(18) == Drafts(ngrams=True)
        each.keep(19, [completion(*range(5))])  # more than there is room for: the oldest go
        assert not each.drafts((3, (7, 8))).answers and each.drafts(17).answers and each.drafts(19).answers
    assert earlier.state() == copy.state() == resumed.state()
    for source in ("none", "ngram"):
        other = EarlierAnswers(source)
        other.load_state(state)
        assert other.state() == EarlierAnswers(source).state(), "a run that wants none now has none"
