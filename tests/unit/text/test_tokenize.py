"""What a tokenizer of somebody else's may do: panic."""

import ast
import re

import pytest
from tokenizers import Regex, pre_tokenizers

from lockstep.errors import PromptError
from lockstep.text import Prompt, decode, encode
from lockstep.text.tokenize import encode_text, panics_as_errors
from lockstep.training.data.examples import FORMATS
from lockstep.training.data.records import BadRow
from tests import tiny
from tests.sources import sources

HOSTILE = "a" * 40


@pytest.fixture(scope="module")
def panicking():
    """A tokenizer whose pattern takes for ever on a run of one letter, as Llama 3's does on 12 MB of spaces."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b|."), "isolated")
    with pytest.raises(BaseException, match="retry-limit") as caught:
        tokenizer.encode(HOSTILE)
    assert not isinstance(caught.value, Exception), "this test proves nothing: it is an exception as others are"
    return tokenizer


def test_a_panic_is_an_error_of_the_text(panicking):
    with pytest.raises(PromptError, match="prompt 3: the tokenizer's library gave up .*retry-limit"):
        encode(panicking, [Prompt(id=3, text=HOSTILE)])
    assert decode(panicking, encode_text(panicking, "xy")), "it goes on"
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt


def test_a_row_that_panics_is_a_bad_row_and_the_others_are_examples(panicking):
    first, bad, last = FORMATS["text"].tokenize(panicking, [{"text": text} for text in ("x", HOSTILE, "y")])
    assert isinstance(bad, BadRow) and "gave up" in str(bad)
    assert not isinstance(first, BadRow) and not isinstance(last, BadRow)


def test_a_text_far_beyond_the_length_is_refused_before_it_is_encoded():
    chat = ({"role": "user", "content": HOSTILE * 1000},)
    for prompt in (Prompt(id=1, text=HOSTILE * 1000), Prompt(id=1, messages=chat)):
        with pytest.raises(PromptError, match=r"prompt 1 has 400\d\d characters, far beyond the 8 tokens of"):
            encode(tiny.tokenizer(), [prompt], max_seq_len=8)


def last_name(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def test_nothing_else_calls_a_tokenizer():
    names = re.compile(r"tokenizer(\.(encode|decode|tokenize|apply_chat_template|batch_\w+))?")
    calls = set()
    for module, text in sources("tokenizer").items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and re.search("tokenizer|encode|decode|apply|batch", last_name(node.func)):
                name = ast.unparse(node.func)
                if names.fullmatch(name.removeprefix("self._").removeprefix("self.")):
                    calls.add((module, name))
    assert calls == {
        ("text/tokenize.py", "tokenizer"),
        ("text/tokenize.py", "tokenizer.encode"),
        ("text/tokenize.py", "tokenizer.apply_chat_template"),
        ("text/tokenizer.py", "tokenizer.decode"),
        ("tunix/rollout.py", "self._tokenizer.decode"),
        ("tunix/rollout.py", "self._tokenizer.encode"),
        ("doctor/layout_rounds.py", "tokenizer.encode"),  # of its own
        ("training/data/example_check.py", "tokenizer.decode"),  # of ids that it has made
    }
