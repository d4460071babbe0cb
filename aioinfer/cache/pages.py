"""PageAllocator: KV pages with fenced frees, some of which the prefix cache owns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioinfer.cache.fenced import FencedPool

__all__ = ["PageAllocator"]


class PageAllocator(FencedPool):
    """Pages of ``page_size`` consecutive KV positions.

    They have one state besides those of the pool: ``cached``, for pages that the prefix cache owns and whose
    KV is complete and resolved. ``keep()`` makes private pages cached, ``drop()`` returns cached ones to the
    pool.
    """

    __slots__ = ("cached", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages)
        self.page_size = page_size
        #: pages that the prefix cache owns
        self.cached = 0

    def pages_for(self, positions: int) -> int:
        """The number of pages that ``positions`` positions occupy."""
        return -(-positions // self.page_size)

    def keep(self, count: int) -> None:
        """Transfer ``count`` private pages to the prefix cache."""
        self._num_private -= count
        self.cached += count

    def drop(self, pages: Sequence[int], fence: int) -> None:
        """Return pages of the prefix cache to the pool; they are free once step ``fence`` has resolved."""
        self.cached -= len(pages)
        self._num_private += len(pages)
        self.give(pages, fence)

    def check(self) -> None:
        counted = self.free + self.fenced + self.private + self.cached
        assert counted == self.total, f"{counted} pages counted, {self.total} exist"
        assert self.private >= 0, "more pages were given back than taken"
        assert self.cached >= 0, "more pages left the cache than it had"

    def audit(self, owned: Iterable[int], cached: Iterable[int] = ()) -> None:
        """As :meth:`FencedPool.audit`; ``cached`` are the pages of the prefix cache."""
        cached = list(cached)
        assert len(cached) == self.cached, f"{len(cached)} pages in the cache, {self.cached} counted"
        self._num_private += len(cached)
        try:
            super().audit([*owned, *cached])
        finally:
            self._num_private -= len(cached)
