"""Full pages that several sequences of one replica have in common: the same tokens from position 0 on."""

import hashlib
from collections.abc import Sequence

import numpy as np


def page_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Names each full page of ``tokens`` by everything up to its end, so that equal keys mean equal K/V."""
    keys, chain = [], b""
    for end in range(page_size, len(tokens) + 1, page_size):
        page = np.asarray(tokens[end - page_size : end], dtype="<i4").tobytes()
        chain = hashlib.sha256(chain + page).digest()
        keys.append(chain)
    return keys


def tail_key(tokens: Sequence[int], page_size: int, keys: Sequence[bytes]) -> bytes | None:
    """Names the partial page at the end of ``tokens`` likewise; None where they end with a full one.

    Args:
        tokens: from position 0 on.
        page_size: tokens in a page.
        keys: of the full pages among them (`page_keys`).
    """
    tail = tokens[len(keys) * page_size :]
    if not tail:
        return None
    before = keys[-1] if keys else b""
    return hashlib.sha256(b"tail" + before + np.asarray(tail, dtype="<i4").tobytes()).digest()


class PrefixTable:
    """Finds the page that already holds a prefix. A page is listed from its allocation until it is free again."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest run of ``keys`` from the start that is listed."""
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def add(self, key: bytes, page: int) -> None:
        """Lists ``page`` under ``key``; the first page listed under a key stays."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key

    def remove(self, pages: Sequence[int]) -> None:
        """Forgets pages that became free."""
        for page in pages:
            key = self._keys.pop(page, None)
            if key is not None:
                del self._pages[key]
