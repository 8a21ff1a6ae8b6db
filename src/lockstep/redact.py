"""Secret values taken out of a stream of bytes, whatever the pieces are in which it comes.

Workers run it as a script, ``python3 redact.py NAME ...``, where no package is installed, with Python 3.8 or newer.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import signal
import sys
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any

SHORTEST = 6  # letters of a value below which it is not looked for: 0, true, debug stand everywhere
REDACTED = b"<redacted>"
SECRET_NAME = re.compile(r"AUTH|PASSW|TOKEN|KEY|SECRET|CREDENTIAL", re.IGNORECASE)
"""Names of variables whose values are secret wherever they come from."""
_HEAD = 8  # bytes at the beginning of a form: where it is over several lines, fewer do not wait for the rest
_NESTED = 60  # letters of a value up to which it is looked for in two forms at once: longer ones are lines of a file
_SHOWN = 128  # bytes that were shown already and are looked at again, for a form whose first few are among them
_LINE_END = rb"\\[nr]|[\s\"'\\,]"
_DUMP = rb" {2}\|[^|\n]*\|\s*\n[0-9a-f]{7,8} +| {2}[^\n]{1,16}\n[0-9a-f]{8}: |\n[0-7]{7} |\\x|0x|[:;-]|" + _LINE_END
"""Separators of the bytes of a value, as ``hexdump -C``, ``xxd`` and ``od`` write them, and source code."""
_GAP = re.compile(rb"(?=  |\n)")
_CHARACTERS = re.compile(rb"(?: [0-9a-fA-F]{2,4})* {2,}[^\n]{1,18}")  # the end of a line of a dump


class Redactor:
    """Replaces values in a stream.

    Args:
        shortest: The letters of a value below which it is left alone.
    """

    def __init__(self, values: Iterable[str], shortest: int = SHORTEST) -> None:
        self._views = _views(frozenset(values), shortest)
        self._shown, self._rest = b"", b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown now: an end that may be the beginning of a value waits for what comes next."""
        return self._take(data, ended=False) if self._views else data

    def flush(self) -> bytes:
        """Return what still waits: the stream has ended."""
        return self._take(b"", ended=True)

    def text(self, text: str) -> str:
        """Return a whole text without the values."""
        data = text.encode(errors="surrogateescape")
        return _without(data, self._spans(data), 0, len(data)).decode(errors="surrogateescape")

    def _take(self, new: bytes, ended: bool) -> bytes:
        data, shown = self._shown + self._rest + new, len(self._shown)
        spans = self._spans(data)
        keep = len(data) if ended else max(shown, min(view.waits_from(data) for view in self._views))
        for start, end in spans:
            if start < keep:
                keep = max(keep, end)
        self._shown, self._rest = data[max(0, keep - _SHOWN) : keep], data[keep:]
        return _without(data, spans, shown, keep)

    def _spans(self, data: bytes) -> list[tuple[int, int]]:
        """The places of values, in order; none touches the next."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted(span for view in self._views for span in view.spans(data)):
            if merged and start < merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        return merged


@functools.lru_cache(maxsize=4)  # processes of a job have the same
def _views(values: frozenset[str], shortest: int) -> tuple[_View, ...]:
    parts = {part for value in values for part in _parts(value) if len(part) >= shortest}
    texts = {form for part in parts for form in _forms(part)}
    nested = {form for part in parts if len(part) <= _NESTED for text in _forms(part) for form in _forms(text)}
    letters = {form for form in texts | nested if re.fullmatch(r"[\w+/-]+", form)}
    dumped = {text.encode(errors="surrogateescape").hex() for text in texts}
    views = (_View(texts | nested), _View(letters, _LINE_END), _View(dumped, _DUMP, lower=True))
    return views if texts else ()


class _View:
    """Finds forms of values in bytes, of which some are left out first.

    Args:
        separators: A pattern of what is left out; empty for nothing.
        lower: Whether capital letters count as small ones.
    """

    def __init__(self, forms: Iterable[str], separators: bytes = b"", lower: bool = False) -> None:
        self._forms = sorted({form.encode(errors="surrogateescape") for form in forms})
        self._pattern = re.compile(_alternatives(self._forms))
        self._separators, self._lower = re.compile(separators) if separators else None, lower
        self._heads: dict[bytes, list[bytes]] = {}
        for form in self._forms:
            self._heads.setdefault(form[:_HEAD], []).append(form)
        self._head = re.compile(b"(?=(" + _alternatives(sorted(self._heads)) + b"))")
        self._beginnings = {form[:size] for form in self._forms for size in range(1, min(_HEAD, len(form)))}
        self._longest = max(map(len, self._forms), default=0)

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        """The places of whole forms."""
        spans = [match.span() for match in self._pattern.finditer(self._squeezed(data))]
        if self._separators is None or not spans:
            return spans
        places = self._places(data)
        return [(places[start], self._end(data, places[end - 1] + 1)) for start, end in spans]

    def waits_from(self, data: bytes) -> int:
        """The beginning of a form that the data ends within; the length of the data where there is none."""
        # More than this is no form, but a value's beginning before endless spaces.
        tail = data[-(4 * self._longest + _SHOWN) :]
        before = len(data) - len(tail)
        if self._separators is None:
            return len(data) - self._incomplete(tail[-self._longest :])
        if not self._head.search(self._squeezed(tail)):
            return len(data)
        # The data may end within what stands between: "0" of "0x", half of a line's characters or of the next address.
        last = max(0, len(tail) - _SHOWN)
        ends = {len(tail) - 2, len(tail) - 1, len(tail), *(match.end() for match in _GAP.finditer(tail, last))}
        places = []
        for end in ends:
            if size := self._incomplete(self._squeezed(tail[:end])[-self._longest :]):
                places.append(before + self._places(tail[:end])[-size])
        return min(places, default=len(data))

    def _incomplete(self, squeezed: bytes) -> int:
        """The bytes at the end that are the beginning of a form; 0 for none."""
        for match in self._head.finditer(squeezed):
            rest = squeezed[match.start() :]
            if any(len(form) > len(rest) and form.startswith(rest) for form in self._heads[match[1]]):
                return len(rest)
        if self._separators is not None:
            return 0
        sizes = range(min(_HEAD - 1, len(squeezed)), 0, -1)
        return next((size for size in sizes if squeezed[-size:] in self._beginnings), 0)

    def _squeezed(self, data: bytes) -> bytes:
        data = data if self._separators is None else self._separators.sub(b"", data)
        return data.lower() if self._lower else data

    def _places(self, data: bytes) -> list[int]:
        """The place in the data of each byte that is not left out."""
        assert self._separators is not None
        places: list[int] = []
        before = 0
        for match in self._separators.finditer(data):
            places.extend(range(before, match.start()))
            before = match.end()
        places.extend(range(before, len(data)))
        return places

    def _end(self, data: bytes, end: int) -> int:
        """The end of a form, with the same bytes as characters in a dump."""
        characters = _CHARACTERS.match(data, end) if self._lower else None
        return characters.end() if characters else end


def _alternatives(forms: list[bytes]) -> bytes:
    """A pattern of sorted forms that looks at each byte once, and takes the longest."""
    if not forms:
        return b"(?!)"
    branches = []
    while forms:
        count = next((number for number, form in enumerate(forms) if form[:1] != forms[0][:1]), len(forms))
        first, last = forms[0], forms[count - 1]  # they are sorted: what these share, all do
        shared = next((at for at in range(len(first)) if first[at] != last[at]), len(first))
        common, rest = first[:shared], [form[shared:] for form in forms[:count]]
        inner = [form for form in rest if form]
        branch = re.escape(common) + (b"(?:" + _alternatives(inner) + b")" if inner else b"")
        branches.append(branch + (b"?" if inner and len(inner) < len(rest) else b""))
        forms = forms[count:]
    return b"|".join(branches)


def _without(data: bytes, spans: list[tuple[int, int]], start: int, end: int) -> bytes:
    """A part of data with each place of a value replaced."""
    out, at = bytearray(), start
    for first, last in spans:
        if first < end and last > start:
            out += data[at:first] + REDACTED
            at = max(at, last)
    return bytes(out + data[at:end])


def _parts(value: str) -> set[str]:
    """A value, its lines, and what is secret in it by itself: of quotes, JSON, a URL, a header, names with values."""
    parts, left = set(), [value]
    while left:
        part = left.pop()
        if part not in parts:
            parts.add(part)
            left += part.splitlines()  # a value of several lines is shown line by line
            left += [match[1] for match in (re.fullmatch(form, part.strip()) for form in _WRAPPED) if match]
            left += [secret for name, secret in _NAMED.findall(part) if SECRET_NAME.search(name)]
            with contextlib.suppress(ValueError, RecursionError):
                left += _secrets_in(json.loads(part), secret=False)
            with contextlib.suppress(ValueError):
                decoded = base64.b64decode(part, validate=True).decode()
                left += [decoded, decoded.partition(":")[2]] if len(decoded) >= SHORTEST else []
    return parts


_WRAPPED = (r"'(.*)'", r'"(.*)"', r"(?i:bearer|basic|token) +(\S+)", r"\w+://[^/?#\s:@]*:([^/?#\s@]+)@.*")
_NAMED = re.compile(r"([\w.-]+)\s*[=:]\s*([^;&,\s\"'{}]+)")


def _secrets_in(value: Any, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secrets_in(inner, secret or bool(SECRET_NAME.search(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets_in(inner, secret)
    elif isinstance(value, str) and secret:
        yield value


def _forms(value: str) -> set[str]:
    return {*_written(value), *_encoded(value)}


def _written(value: str) -> Iterator[str]:
    """A value as programs write it: as it is, in JSON, Python, a shell and a URL."""
    data = value.encode(errors="surrogateescape")
    quoted = {urllib.parse.quote(data, safe=""), urllib.parse.quote(data), urllib.parse.quote_plus(data)}
    quoted.add("".join(f"%{byte:02X}" for byte in data))
    yield from quoted
    yield from (re.sub("%..", lambda code: code[0].lower(), text) for text in quoted)
    for text in (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]):
        yield from (text, text.replace("/", "\\/"))
    units = value.encode("utf-16-be", errors="surrogatepass")
    yield "".join("\\u" + units[at : at + 2].hex() for at in range(0, len(units), 2))
    yield from (value, value.replace("'", "'\"'\"'"), value.replace("'", "'\\''"))


def _encoded(value: str) -> Iterator[str]:
    """A value in hexadecimal digits, and in base64 beside whatever else is encoded with it."""
    data = value.encode(errors="surrogateescape")
    yield from (data.hex(), data.hex().upper())
    for before in range(3):  # bytes of the group of three that are those of something else
        whole = base64.b64encode(bytes(before) + data).decode()
        # The characters that depend on nothing but the value.
        part = whole[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
        yield from (part, part.translate(str.maketrans("+/", "-_")))


def main(names: list[str]) -> None:
    """Copy standard input to standard output without the values of some variables of the environment."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the program's last words come after such a signal
    redactor = Redactor([os.environ[name] for name in names if name in os.environ])
    while True:
        data = os.read(0, 1 << 16)
        out = redactor.feed(data) if data else redactor.flush()
        while out:
            out = out[os.write(1, out) :]
        if not data:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
