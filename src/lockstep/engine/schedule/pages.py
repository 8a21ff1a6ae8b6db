"""The page allocator of one replica's KV cache: free pages, and reference counts of the others."""

import bisect
import operator

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
        """Allocates ``count`` pages with one reference each; at most `num_free` may be asked for (assertion)."""
        assert count <= len(self._free), (count, len(self._free))
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, page: int) -> None:
        """Adds a reference to an allocated page."""
        self._references[page] += 1

    def release(self, pages: list[int]) -> list[int]:
        """Drops one reference of each page; returns the pages that became free, whose numbers are no longer valid."""
        freed = []
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                bisect.insort(self._free, page, key=operator.neg)
                freed.append(page)
        return freed
