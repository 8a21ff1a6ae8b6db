"""The KV pages of one replica: an allocator with reference counts, and the table of prefixes that pages hold.

Prefix caching by a chained hash of each page's tokens, as in vLLM
(https://docs.vllm.ai/en/latest/design/prefix_caching/).
"""

import bisect
import hashlib
import operator
from collections.abc import Callable, Sequence

import numpy as np

NULL_PAGE = 0
"""The page that unused rows and idle slots write to. It is never allocated, and only masked positions read it."""


class PageAllocator:
    """Allocates page numbers ``1 .. num_pages - 1`` of one replica, lowest first, with a reference count for each.

    Args:
        num_pages: The number of pages of the pool, the null page included; at least 2.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # the lowest last, where removing costs nothing
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """The number of pages that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages with one reference each; at most `num_free` may be asked for (assertion)."""
        assert count <= len(self._free), (count, len(self._free))
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, page: int) -> None:
        """Add a reference to an allocated page."""
        self._references[page] += 1

    def release(self, pages: list[int]) -> list[int]:
        """Drop one reference of each page; return the pages that became free, whose numbers are no longer valid."""
        freed = []
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                bisect.insort(self._free, page, key=operator.neg)
                freed.append(page)
        return freed


def page_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Return the key of each full page of ``tokens``, a hash of all tokens up to its end: equal keys, equal K/V."""
    keys, chain = [], b""
    text, size = np.asarray(tokens, dtype="<i4").tobytes(), 4 * page_size
    for end in range(size, len(text) + 1, size):
        chain = hashlib.sha256(chain + text[end - size : end]).digest()
        keys.append(chain)
    return keys


def tail_key(tokens: Sequence[int], page_size: int, keys: Sequence[bytes]) -> bytes | None:
    """Return a key of the partial page at the end of ``tokens``; None where they end with a full page.

    Args:
        tokens: The token ids from position 0 on.
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
        """Return the pages of the longest prefix of ``keys`` that is listed."""
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def add(self, key: bytes, page: int) -> None:
        """List ``page`` under ``key``, unless another page is listed there."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key
            self._added(key)

    def remove(self, pages: Sequence[int]) -> None:
        """Remove pages that became free."""
        for page in pages:
            key = self._keys.pop(page, None)
            if key is not None:
                del self._pages[key]
                self._removed(key)
