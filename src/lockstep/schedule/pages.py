"""Which pages of one replica's KV cache are free, and how many sequences read each of the others."""

import heapq

NULL_PAGE = 0
"""The page that unused rows and idle slots write to. It is never handed out and never read unmasked."""


class PageAllocator:
    """Hands out page numbers ``1 .. num_pages - 1`` of one replica, lowest first, with a reader count for each.

    Args:
        num_pages: pages of the pool, the null page included; at least 2.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self._free = list(range(1, num_pages))
        self._readers: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free pages, each with one reader. Nothing is taken when there are fewer (assertion)."""
        assert count <= len(self._free), (count, len(self._free))
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._readers[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Adds a reader to an allocated page."""
        self._readers[page] += 1

    def release(self, pages: list[int]) -> list[int]:
        """Takes one reader from each page; returns those that became free, whose numbers are no longer valid."""
        freed = []
        for page in pages:
            self._readers[page] -= 1
            if self._readers[page] == 0:
                del self._readers[page]
                heapq.heappush(self._free, page)
                freed.append(page)
        return freed
