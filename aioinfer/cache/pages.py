"""PageAllocator: KV pages with fenced frees, some of them lent to the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioinfer.cache.fenced import FencedPool

__all__ = ["PageAllocator"]


class PageAllocator(FencedPool):
    """Pages of ``page_size`` consecutive KV positions.

    A fourth state joins those of the pool: ``cached``, for pages that the prefix cache owns and whose KV
    is complete and resolved. ``keep()`` makes private pages cached, ``drop()`` takes them back.
    """

    __slots__ = ("cached", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages)
        self.page_size = page_size
        #: pages that the prefix cache owns
        self.cached = 0

    def pages_for(self, positions: int) -> int:
        """How many pages hold this many positions."""
        return -(-positions // self.page_size)

    def keep(self, count: int) -> None:
        """``count`` private pages belong to the prefix cache from now on."""
        self._num_private -= count
        self.cached += count

    def drop(self, pages: Sequence[int], fence: int) -> None:
        """Take pages back from the prefix cache; free once step ``fence`` has resolved."""
        self.cached -= len(pages)
        self._num_private += len(pages)
        self.give(pages, fence)

    def check(self) -> None:
        counted = self.free + self.fenced + self.private + self.cached
        assert counted == self.total, f"{counted} pages counted, {self.total} exist"
        assert self.private >= 0, "more pages were given back than taken"
        assert self.cached >= 0, "more pages left the cache than it had"

    def audit(self, owned: Iterable[int], cached: Iterable[int] = ()) -> None:
        """The same as :meth:`FencedPool.audit`, with the pages of the prefix cache told apart."""
        cached = list(cached)
        assert len(cached) == self.cached, f"{len(cached)} pages in the cache, {self.cached} counted"
        self._num_private += len(cached)
        try:
            super().audit([*owned, *cached])
        finally:
            self._num_private -= len(cached)
