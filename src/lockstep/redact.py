"""Secret values taken out of a stream of bytes, whatever the pieces are in which it comes.

Workers run it as a script, ``python3 redact.py NAME ...``, where no package is installed, with Python 3.8 or newer.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import urllib.parse
from collections.abc import Iterable

SHORTEST = 6  # letters of a value below which it is not looked for: 0, true, debug stand everywhere
REDACTED = b"<redacted>"


class Redactor:
    """Replaces values in a stream.

    Args:
        shortest: The letters of a value below which it is left alone.
    """

    def __init__(self, values: Iterable[str], shortest: int = SHORTEST) -> None:
        forms: set[str] = set()
        for value in values:
            # A value of several lines is shown line by line; one in a data structure with escapes.
            for part in (value, *value.splitlines()):
                if len(part) >= shortest:
                    forms.update(_forms(part))
        # The longest first: a value may begin with another one.
        self._forms = sorted((form.encode(errors="surrogateescape") for form in forms), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms)))
        self._prefixes = {form[:size] for form in self._forms for size in range(1, len(form))}
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown now: an end that may be the beginning of a value waits for what comes next."""
        if not self._forms:
            return data
        data = self._rest + data
        keep = len(data) - self._partial(data)
        for match in self._pattern.finditer(data):
            if match.start() < keep:
                keep = max(keep, match.end())
        self._rest = data[keep:]
        return self._pattern.sub(REDACTED, data[:keep])

    def _partial(self, data: bytes) -> int:
        """Number of last bytes of ``data`` with which a form begins, without being complete."""
        sizes = range(min(len(self._forms[0]) - 1, len(data)), 0, -1)
        return next((size for size in sizes if data[-size:] in self._prefixes), 0)

    def flush(self) -> bytes:
        """Return what still waits: the stream has ended."""
        rest, self._rest = self._rest, b""
        return self._pattern.sub(REDACTED, rest) if self._forms else rest

    def text(self, text: str) -> str:
        """Return a whole text without the values."""
        if not self._forms:
            return text
        data = self._pattern.sub(REDACTED, text.encode(errors="surrogateescape"))
        return data.decode(errors="surrogateescape")


def _forms(value: str) -> set[str]:
    """A value as programs write it: as it is, in JSON and Python, in a URL, in hexadecimal digits and in base64."""
    data = value.encode(errors="surrogateescape")
    quoted = {urllib.parse.quote(data, safe=""), urllib.parse.quote(data), urllib.parse.quote_plus(data)}
    quoted.add("".join(f"%{byte:02X}" for byte in data))
    quoted |= {re.sub("%..", lambda code: code[0].lower(), text) for text in quoted}
    written = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    units = value.encode("utf-16-be", errors="surrogatepass")
    written.add("".join("\\u" + units[at : at + 2].hex() for at in range(0, len(units), 2)))
    written |= {text.replace("/", "\\/") for text in written}
    encoded = set()
    for before in range(3):  # bytes of the group of three that are those of something else
        whole = base64.b64encode(bytes(before) + data).decode()
        # The characters that depend on nothing but the value.
        part = whole[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
        encoded |= {part, part.translate(str.maketrans("+/", "-_"))}
    return {value, data.hex(), data.hex().upper(), *quoted, *written, *encoded}


def main(names: list[str]) -> None:
    """Copy standard input to standard output without the values of some variables of the environment."""
    for number in (signal.SIGTERM, signal.SIGINT):
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
