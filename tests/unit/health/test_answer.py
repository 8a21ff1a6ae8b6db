"""The states of one answer: each where it is, and where it only seems to be."""

import pytest

from lockstep.health import AnsweredPrompt, State, Vocabulary, measure_health
from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason

END, SPECIAL = 1, 2
CHATML = Vocabulary(special=frozenset({SPECIAL}), ends=frozenset({END}), parts=frozenset({"<think>", "</think>"}))


def pieces(text):
    """Token ids of a text: a word, a number, or a sign each."""
    import re

    return tuple(100 + (hash_of(piece) % 100_000) for piece in re.findall(r"\s?\w+|\s|[^\w\s]", text))


def hash_of(piece):
    import zlib

    return zlib.crc32(piece.encode(errors="replace"))


def answered(text, prompt="What is the capital of France?", *, reason=FinishReason.STOP, tokens=None, **more):
    written = pieces(text) if tokens is None else tuple(tokens)
    end = (END,) if reason == FinishReason.STOP else ()
    completion = Completion(
        prompt_id=0,
        generation_id=0,
        tokens=(*written, *end),
        logprobs=(-1.0,) * (len(written) + len(end)),
        finish_reason=reason,
    )
    asked = Prompt(id=0, text=prompt)
    return AnsweredPrompt(prompt=asked, completion=completion, text=text, prompt_tokens=pieces(prompt), **more)


def states(text, *arguments, vocabulary=CHATML, **options):
    return list(measure_health(answered(text, *arguments, **options), vocabulary).states)


@pytest.mark.parametrize("text", ["Paris.", "4", "Yes", "It is Paris, on the Seine.", "a a a a", "0, 0, 0, 0"])
def test_a_short_answer_is_healthy(text):
    assert states(text) == []


def test_a_loop_has_the_token_with_which_it_begins():
    health = measure_health(answered("It is the town of " + "ba " * 60, reason=FinishReason.LENGTH), CHATML)
    assert health.states == (State.LOOP, State.CUT) and str(health) == "loop cut"
    assert health.loop_from == 5 and health.loop_share > 0.9
