"""Secrets in a stream, whatever the pieces."""

import base64
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from lockstep import redact
from lockstep.redact import SECRET_NAME, Redactor
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


KEY = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789+/=="  # longer than a line of every dump
LINES = (
    lambda text, mark: mark.join(text[at : at + 20] for at in range(0, len(text), 20)),
    lambda text, mark: mark.join(text[at : at + 3] for at in range(0, len(text), 3)),
)


def bytes_of(data, form, mark=""):
    return mark.join(form.format(byte) for byte in data)


def rows(data, form, column=None, width=16):
    """A dump, a line for each few bytes."""
    parts = [(at, data[at : at + width]) for at in range(0, len(data), width)]
    shown = ("".join(chr(byte) if 32 <= byte < 127 else "." for byte in part) for _, part in parts)
    return "".join(
        form.format(at=at, bytes=column(part), text=text) for (at, part), text in zip(parts, shown, strict=True)
    )


def words(part):
    return " ".join(part[at : at + 2].hex() for at in range(0, len(part), 2))


def columns(part):
    return f"{bytes_of(part[:8], '{:02x}', ' ')}  {bytes_of(part[8:], '{:02x}', ' ')}"


BESIDE = f"Authorization: {KEY}; the rest of a long line"
DUMPS = {
    "xxd": rows(BESIDE.encode(), "{at:08x}: {bytes:<39}  {text}\n", words),
    "hexdump -C": rows(BESIDE.encode(), "{at:08x}  {bytes:<48}  |{text}|\n", columns),
    "od -An -tx1": rows(BESIDE.encode(), " {bytes}\n", lambda part: bytes_of(part, "{:02x}", " ")),
    "od -tx1": rows(BESIDE.encode(), "{at:07o} {bytes}\n", lambda part: bytes_of(part, "{:02x}", " ")),
    "a fingerprint": bytes_of(KEY.encode(), "{:02X}", ":"),
    "bytes of Python": bytes_of(KEY.encode(), "\\x{:02x}"),
    "an array of C": "{ " + bytes_of(KEY.encode(), "0x{:02X}", ",\n  ") + " }",
}
WRAPPED = {
    **{f"base64, {mark!r}, {number}": wrap(base64.b64encode(BESIDE.encode()).decode(), mark)
       for number, wrap in enumerate(LINES) for mark in ("\n", "\r\n", "\n    ", "\\n", '"\n  "', "\\\n")},
    **{f"hex, {mark!r}": LINES[0](KEY.encode().hex(), mark) for mark in ("\n", "\\n", '",\n"', " ")},
    **DUMPS,
}  # fmt: skip


def longest_shared(shown, whole):
    """The most characters in a row that a text still has of another, lines and their marks left out."""
    parts = re.findall(r"[\w+/=]+", shown.replace("<redacted>", " "))
    return max((len(part) for part in parts if part in whole), default=0)


@pytest.mark.parametrize("way", WRAPPED)
def test_a_value_over_several_lines_is_found(way):
    text = WRAPPED[way]
    shown = Redactor([KEY]).text(text)
    assert "<redacted>" in shown
    whole = {KEY, KEY.encode().hex(), KEY.encode().hex().upper()}
    whole |= {base64.b64encode(bytes(before) + KEY.encode()).decode() for before in range(3)}
    assert max(longest_shared(shown, one) for one in whole) < 6, shown


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("way", WRAPPED)
def test_any_pieces_of_a_value_over_several_lines_show_no_more_of_it(way, seed):
    draw, redactor, text = random.Random(seed), Redactor([KEY]), f"before {WRAPPED[way]} after\n".encode()
    at, out = 0, b""
    while at < len(text):
        size = draw.choice((1, 2, 3, 7, 40))
        out += redactor.feed(text[at : at + size])
        at += size
    out += redactor.flush()
    assert b"<redacted>" in out and out.startswith(b"before ") and (out.endswith(b" after\n") or b"|" in out)
    digits = re.sub(rb"[^0-9a-f]", b"", re.sub(rb"<redacted>|^[0-9a-f]{7,8}:? ", b"|", out, flags=re.MULTILINE).lower())
    assert KEY.encode().hex()[16:].encode() not in digits
    assert base64.b64encode(BESIDE.encode())[30:60] not in re.sub(rb"[^A-Za-z0-9+/=]", b"", out)


ACCOUNT = json.dumps(
    {"type": "service_account", "private_key": f"-----BEGIN-----\n{KEY}\n", "a": [{"token": "nested-one"}]}
)


@pytest.mark.parametrize(
    ("value", "shown", "wanted"),
    [
        (ACCOUNT, f"the key {KEY} of a service_account", "the key <redacted> of a service_account"),
        (ACCOUNT, "it has nested-one", "it has <redacted>"),
        (base64.b64encode(ACCOUNT.encode()).decode(), "it has nested-one", "it has <redacted>"),
        (ACCOUNT, f"as base64: {base64.b64encode(ACCOUNT.encode()).decode()}", "as base64: <redacted>"),
        (f'"{KEY}"', f"of docker: {KEY}", "of docker: <redacted>"),
        (f"Bearer {KEY}", f"token {KEY}", "token <redacted>"),
        (base64.b64encode(b"user:pass-word").decode(), "it is pass-word", "it is <redacted>"),
        ("postgres://user:pass-word@host/db", "PGPASSWORD=pass-word host", "PGPASSWORD=<redacted> host"),
        ("Endpoint=https://a;AccountKey=abc+def/==;x=1", "key abc+def/==", "key <redacted>"),
        (SECRET, json.dumps(json.dumps({"x": SECRET})), '"{\\"x\\": \\"<redacted>\\"}"'),
        (SECRET, repr(json.dumps([SECRET]).encode()), """b'["<redacted>"]'"""),
        ("it's-quoted", shlex.quote("it's-quoted"), "'<redacted>'"),
        (SECRET, urllib.parse.quote(urllib.parse.quote(SECRET, safe="")), "<redacted>"),
        (SECRET, base64.b64encode(base64.b64encode(SECRET.encode())).decode(), "<redacted>g=="),
        (SECRET, base64.b64encode(SECRET.encode().hex().encode()).decode(), "<redacted>"),
    ],
)
def test_quoted_and_nested_values_are_found(value, shown, wanted):
    found = Redactor([value]).text(shown)
    assert re.sub(r"(<redacted>)[\w=]{0,4}$", r"\1", found) == re.sub(r"(<redacted>)[\w=]{0,4}$", r"\1", wanted)


def test_what_only_looks_like_the_beginning_of_a_dump_does_not_wait():
    redactor = Redactor([KEY])
    line = f"step {KEY.encode().hex()[:8]} {base64.b64encode(KEY.encode()).decode()[:6]}\n".encode()
    assert redactor.feed(line) == line
    assert len(redactor.feed(base64.b64encode(KEY.encode())[:30] + b" " * 100_000)) > 90_000, "endless spaces"


@pytest.mark.parametrize("name", ["HF_TOKEN", "HF_AUTH", "WANDB_PASSWD", "wandb_api_key", "AWS_SECRET", "CREDENTIALS"])
def test_secret_names(name):
    assert SECRET_NAME.search(name) and not SECRET_NAME.search("WANDB_MODE")


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
