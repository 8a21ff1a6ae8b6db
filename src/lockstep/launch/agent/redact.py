"""Secret values taken out of a stream of bytes, whatever the pieces are in which it comes."""

from __future__ import annotations

import json
import re

SHORTEST = 6
"""Letters of a value below which it is not looked for: 0, true, debug stand everywhere."""
REDACTED = b"<redacted>"


class Redactor:
    """Replaces values in a stream.

    Args:
        values: The secret values. Those with fewer than ``SHORTEST`` letters are left alone.
    """

    def __init__(self, values):
        forms = set()
        for value in values:
            if len(value) >= SHORTEST:
                forms |= {value, json.dumps(value)[1:-1], repr(value)[1:-1]}
                # A key of several lines is shown by line, with a prefix before each.
                forms |= {line for line in value.splitlines() if len(line) >= SHORTEST}
        self._forms = sorted((form.encode() for form in forms), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms))) if self._forms else None
        self._rest = b""

    def feed(self, data):
        """Return what can be shown now: an end that may be the begin of a value waits for what comes next."""
        if self._pattern is None:
            return data
        data = self._rest + data
        out, at = [], 0
        for match in self._pattern.finditer(data):
            out += [data[at : match.start()], REDACTED]
            at = match.end()
        keep = len(data) - max((self._partial(data, form, at) for form in self._forms), default=0)
        self._rest = data[keep:]
        return b"".join([*out, data[at:keep]])

    @staticmethod
    def _partial(data, form, at):
        """Number of last bytes of ``data`` after ``at`` that a form begins with."""
        for size in range(min(len(form) - 1, len(data) - at), 0, -1):
            if data.endswith(form[:size]):
                return size
        return 0

    def flush(self):
        """Return what still waits: the stream has ended."""
        rest, self._rest = self._rest, b""
        return rest

    def text(self, text):
        """Return a whole text without the values."""
        data = text.encode(errors="surrogateescape")
        if self._pattern is not None:
            data = self._pattern.sub(REDACTED, data)
        return data.decode(errors="surrogateescape")
