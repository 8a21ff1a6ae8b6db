"""Secrets in a stream, whatever the pieces."""

import random

import pytest

from lockstep.launch.agent.redact import Redactor

VALUES = ["abcabd", "abcabdef", "two\nlines-of-key", 'quote"d-value', "short"]
TEXT = (
    b"abcabc abcabd abcabdef abcab| two\nlines-of-key lines-of-key "
    b'{"x": "two\\nlines-of-key", "quote\\"d-value"} short abcab'
)
WANTED = b'abcabc <> <> abcab| <> <> {"x": "<>", "<>"} short abcab'.replace(b"<>", b"<redacted>")


@pytest.mark.parametrize("seed", range(30))
def test_any_pieces_give_what_the_whole_gives(seed):
    draw, redactor, at, out = random.Random(seed), Redactor(VALUES), 0, b""
    while at < len(TEXT):
        size = draw.choice((1, 2, 3, 7, 40))
        out += redactor.feed(TEXT[at : at + size])
        at += size
        assert b"abcabd" not in out and b"lines-of-key" not in out
    assert out + redactor.flush() == WANTED


def test_only_what_may_be_the_beginning_of_a_value_waits():
    redactor = Redactor(["secret-value"])
    assert redactor.feed(b"progress 10%\r") == b"progress 10%\r"
    assert redactor.feed(b"a secr") == b"a "
    assert redactor.feed(b"et!") == b"secret!"
    assert redactor.text("x secret-value y") == "x <redacted> y"
    assert Redactor([]).feed(b"all") == b"all"
