"""The KV pages of one replica: an allocator with reference counts, and the table of prefixes that pages hold.

Prefix caching by a chained hash of each page's tokens, as in vLLM
(https://docs.vllm.ai/en/latest/design/prefix_caching/).
"""

import bisect
import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence

import numpy as np

NULL_PAGE = 0
"""The page that unused rows and idle slots write to. It is never allocated, and only masked positions read it."""


class PageAllocator:
    """Allocates page numbers ``1 .. num_pages - 1`` of one replica, lowest first, with a reference count for each.

    A page that a conversation keeps stays as it is when nobody refers to it any more, until the conversation is
    forgotten or `make_room` takes it. It can be allocated all the same, and counts as free.

    Args:
        num_pages: The number of pages of the pool, the null page included; at least 2.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # the lowest last, where removing costs nothing
        self._references: dict[int, int] = {}
        self._keepers: dict[int, set[int]] = {}  # conversations that keep each page
        self._kept: dict[int, set[int]] = {}  # pages that each conversation keeps
        self._idle: dict[int, None] = {}  # pages that are kept and not referred to; the next to be taken first

    @property
    def num_free(self) -> int:
        """The number of pages that can be allocated, once there is room (`make_room`)."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """The number of these that conversations keep."""
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        """Whether conversations alone keep a page."""
        return page in self._idle

    def keep(self, pages: Iterable[int], conversation: int) -> None:
        """Have a conversation keep allocated pages, beside those that it keeps."""
        for page in pages:
            self._keepers.setdefault(page, set()).add(conversation)
            self._kept.setdefault(conversation, set()).add(page)

    def forget(self, conversation: int) -> list[int]:
        """End a conversation; return the pages that became free, whose numbers are no longer valid."""
        freed = []
        for page in sorted(self._kept.pop(conversation, ())):
            self._keepers[page].remove(conversation)
            if not self._keepers[page]:
                del self._keepers[page]
                if page in self._idle:
                    del self._idle[page]
                    self._add_free(page)
                    freed.append(page)
        return freed

    def make_room(self, count: int) -> list[int]:
        """Take kept pages until ``count`` can be allocated; return those, whose numbers are no longer valid.

        Those that were released longest ago go first, of a sequence its last pages.
        """
        taken = list(self._idle)[: max(0, count - len(self._free))]
        for page in taken:
            del self._idle[page]
            for conversation in self._keepers.pop(page):
                self._kept[conversation].remove(page)
            self._add_free(page)
        return taken

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages with one reference each, for which there must be room (assertion)."""
        assert count <= len(self._free), (count, len(self._free))
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a page that is allocated or kept."""
        self._idle.pop(page, None)
        self._references[page] = self._references.get(page, 0) + 1

    def release(self, pages: list[int]) -> list[int]:
        """Drop one reference of each page; return the pages that became free, whose numbers are no longer valid."""
        freed, idle = list[int](), list[int]()
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                (idle if page in self._keepers else freed).append(page)
        for page in freed:
            self._add_free(page)
        # The last page of a prefix is of no use without those before it: it is taken first.
        self._idle.update(dict.fromkeys(reversed(idle)))
        return freed

    def _add_free(self, page: int) -> None:
        bisect.insort(self._free, page, key=operator.neg)


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
