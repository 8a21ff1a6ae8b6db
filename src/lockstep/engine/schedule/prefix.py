"""The prefix table: finds pages of one replica that hold the K/V of the same tokens from position 0 on.

Prefix caching by a chained hash of each page's tokens, as in vLLM
(https://docs.vllm.ai/en/latest/design/prefix_caching/).
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np


def page_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Returns the key of each full page of ``tokens``, a hash of all tokens up to its end: equal keys, equal K/V."""
    keys, chain = [], b""
    text, size = np.asarray(tokens, dtype="<i4").tobytes(), 4 * page_size
    for end in range(size, len(text) + 1, size):
        chain = hashlib.sha256(chain + text[end - size : end]).digest()
        keys.append(chain)
    return keys


def tail_key(tokens: Sequence[int], page_size: int, keys: Sequence[bytes]) -> bytes | None:
    """Returns a key of the partial page at the end of ``tokens``; None where they end with a full page.

    Args:
        tokens: The token ids from position 0 on.
        page_size: The number of tokens in a page.
        keys: The keys of the full pages of ``tokens`` (`page_keys`).
    """
    tail = tokens[len(keys) * page_size :]
    if not tail:
        return None
    before = keys[-1] if keys else b""
    return hashlib.sha256(b"tail" + before + np.asarray(tail, dtype="<i4").tobytes()).digest()


class PrefixTable:
    """The pages by key. A page is listed from its allocation until it is free again.

    Args:
        added: Called with a key that is listed from now on.
        removed: Called with a key that is no longer listed.
    """

    def __init__(
        self,
        added: Callable[[bytes], object] = lambda key: None,
        removed: Callable[[bytes], object] = lambda key: None,
    ) -> None:
        self._added, self._removed = added, removed
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest prefix of ``keys`` that is listed."""
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def add(self, key: bytes, page: int) -> None:
        """Lists ``page`` under ``key``, unless another page is listed there."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key
            self._added(key)

    def remove(self, pages: Sequence[int]) -> None:
        """Removes pages that became free."""
        for page in pages:
            key = self._keys.pop(page, None)
            if key is not None:
                del self._pages[key]
                self._removed(key)
