"""What is probably in the prefix cache of a replica that does not say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PAGE", "RememberedPages"]

#: tokens that a hash covers, whatever pages the engines have
PAGE = 16


class RememberedPages:
    """Pages that requests have left there, by the hashes of their prefixes: those that were used last, as
    many as the replica has. What a request finds there corrects it."""

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        #: in the order in which they are forgotten: of a prefix, the last page first
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, pages: Sequence[int], most: int) -> None:
        """A request has left these there, of at most so many."""
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > most:
            self._pages.popitem(last=False)

    def leading(self, pages: Sequence[int]) -> int:
        """How many of a prompt's first pages are there."""
        for count, page in enumerate(pages):
            if page not in self._pages:
                return count
        return len(pages)

    def found(self, pages: Sequence[int], count: int) -> None:
        """A request has found so many of its pages there: the others are gone."""
        for page in pages[count:]:
            self._pages.pop(page, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._pages.clear()
