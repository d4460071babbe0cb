"""Prefixes of prompts by hashes of their pages, and a guess at the prefix cache of another process."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

__all__ = ["PAGE", "RememberedPages", "take_away"]

#: tokens that a hash covers, independent of the engines' page size
PAGE = 16


def take_away(counts: Counter[int], pages: Sequence[int]) -> None:
    """Undo ``counts.update(pages)``."""
    for page in pages:
        counts[page] -= 1
        if not counts[page]:
            del counts[page]


class RememberedPages:
    """Pages that are probably in the prefix cache of a replica that does not say, by the hashes of their
    prefixes: those that were used last, as many as it has. What a request finds there corrects it."""

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        #: in the order in which they are forgotten: of a prefix, the last page first
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, pages: Sequence[int], most: int) -> None:
        """A request has left these there, of at most this many."""
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > most:
            self._pages.popitem(last=False)

    def leading(self, pages: Sequence[int]) -> int:
        """The number of a prompt's first pages that are there."""
        for count, page in enumerate(pages):
            if page not in self._pages:
                return count
        return len(pages)

    def found(self, pages: Sequence[int], count: int) -> None:
        """A request has found this many of its pages there: the others are gone."""
        for page in pages[count:]:
            self._pages.pop(page, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._pages.clear()
