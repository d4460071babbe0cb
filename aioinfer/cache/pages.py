"""PageAllocator: KV pages with fenced frees."""

from __future__ import annotations

from aioinfer.cache.fenced import FencedPool

__all__ = ["PageAllocator"]


class PageAllocator(FencedPool):
    """Pages of ``page_size`` consecutive KV positions."""

    __slots__ = ("page_size",)

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages)
        self.page_size = page_size

    def pages_for(self, positions: int) -> int:
        """How many pages hold this many positions."""
        return -(-positions // self.page_size)
