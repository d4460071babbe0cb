"""PageAllocator: KV pages with fenced frees, some of which the prefix cache owns."""

from __future__ import annotations

from aioinfer.cache.fenced import CachedPool

__all__ = ["PageAllocator"]


class PageAllocator(CachedPool):
    """Pages of ``page_size`` consecutive KV positions."""

    __slots__ = ("page_size",)

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages)
        self.page_size = page_size

    def pages_for(self, positions: int) -> int:
        """The number of pages that ``positions`` positions occupy."""
        return -(-positions // self.page_size)
