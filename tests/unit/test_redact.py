"""Secrets in a stream, whatever the pieces."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from lockstep import redact
from lockstep.redact import Redactor
from tests.fake_cloud.commands import LOADER

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


SECRET = 'p"s/w+rd=é&123'


@pytest.mark.parametrize("before", ["", "a", "ab", "user:", "Basic x:"])
@pytest.mark.parametrize("after", ["", "z", "zz"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64_of_a_text_with_the_value_is_found(before, after, encode):
    shown = Redactor([SECRET]).text(encode((before + SECRET + after).encode()).decode())
    assert "<redacted>" in shown
    rest = shown.replace("<redacted>", "").rstrip("=")
    assert len(rest) <= 4 * len(before + after) // 3 + 6, "at most the characters that the value shares with others"


@pytest.mark.parametrize(
    "form",
    [
        urllib.parse.quote(SECRET, safe=""),
        urllib.parse.quote(SECRET),
        urllib.parse.quote_plus(SECRET),
        urllib.parse.quote(SECRET, safe="").lower().replace("w%2brd", "w%2brd"),
        SECRET.encode().hex(),
        SECRET.encode().hex().upper(),
        json.dumps(SECRET)[1:-1],
        json.dumps(SECRET, ensure_ascii=False)[1:-1],
        json.dumps(SECRET)[1:-1].replace("/", "\\/"),
        repr(SECRET)[1:-1],
    ],
)
def test_other_forms_of_the_value_are_found(form):
    assert Redactor([SECRET]).text(f"<{form}>") == "<<redacted>>"
    redactor = Redactor([SECRET])
    assert b"".join([redactor.feed(bytes([each])) for each in form.encode()]) + redactor.flush() == b"<redacted>"


def test_as_a_script_it_takes_values_out_across_pieces_and_outlives_the_signal_that_ends_the_program(tmp_path):
    script = tmp_path / "redact.py"  # as a worker has it: no package
    script.write_bytes(Path(redact.__file__).read_bytes())
    process = subprocess.Popen(
        [sys.executable, str(script), "TOKEN", "UNSET"],
        env={"PATH": os.environ["PATH"], "TOKEN": "hf_0123456789", **LOADER},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdin.write(b"first\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"first\n"
    process.send_signal(signal.SIGTERM)
    for piece in (b"it is hf_01", b"23456789\n", b"last"):
        process.stdin.write(piece)
        process.stdin.flush()
    assert process.communicate(timeout=60)[0] == b"it is <redacted>\nlast" and process.returncode == 0
