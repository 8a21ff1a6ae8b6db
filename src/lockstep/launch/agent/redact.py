"""Secret values taken out of a stream of bytes, whatever the pieces are in which it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

SHORTEST = 6
"""Letters of a value below which it is not looked for: 0, true, debug stand everywhere."""
REDACTED = b"<redacted>"


class Redactor:
    """Replaces values in a stream.

    Args:
        values: The secret values. Those with fewer than ``SHORTEST`` letters are left alone.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms: set[str] = set()
        for value in values:
            # A value of several lines is shown line by line; one in a data structure with escapes.
            for part in (value, *value.splitlines()):
                if len(part) >= SHORTEST:
                    forms.update((part, json.dumps(part)[1:-1], repr(part)[1:-1]))
        # The longest first: a value may begin with another one.
        self._forms = sorted((form.encode() for form in forms), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms)))
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown now: an end that may be the beginning of a value waits for what comes next."""
        if not self._forms:
            return data
        data = self._rest + data
        waiting = max(self._partial(data, form) for form in self._forms)
        keep = len(data) - waiting
        for match in self._pattern.finditer(data):
            if match.start() < keep:
                keep = max(keep, match.end())
        self._rest = data[keep:]
        return self._pattern.sub(REDACTED, data[:keep])

    @staticmethod
    def _partial(data: bytes, form: bytes) -> int:
        """Number of last bytes of ``data`` with which a form begins, without being complete."""
        for size in range(min(len(form) - 1, len(data)), 0, -1):
            if data.endswith(form[:size]):
                return size
        return 0

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
