"""What a dispatcher knows of a replica from what it has sent there: its load, and its prefix cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.parallel.record import Attempt

__all__ = ["PAGE", "Load", "RememberedPages", "take_away"]

#: tokens that a hash covers, whatever pages the engines have
PAGE = 16


class Load:
    """The attempts that were sent to a replica and have not ended, and their sums."""

    __slots__ = ("attempts", "backlog", "pages", "resuming", "tokens")

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        #: prompt tokens that it has to compute, of attempts without a first token
        self.backlog = 0
        #: and those of them that belong to outputs which have begun
        self.resuming = 0
        #: prompt and possible output of all attempts
        self.tokens = 0
        #: how many attempts have a prefix, by the hashes of its pages
        self.pages: Counter[int] = Counter()

    @property
    def requests(self) -> int:
        """Number of attempts."""
        return len(self.attempts)

    def add(self, attempt: Attempt) -> None:
        """Count an attempt."""
        self.attempts[attempt.number] = attempt
        self.tokens += attempt.tokens
        self._compute(attempt, attempt.uncached)
        self.pages.update(attempt.pages)

    def begun(self, attempt: Attempt) -> None:
        """Its first token is there: its prompt is computed."""
        self.admitted(attempt, 0)

    def admitted(self, attempt: Attempt, uncached: int) -> None:
        """It has to compute this many tokens, and not the number that was assumed."""
        self._compute(attempt, uncached - attempt.uncached)
        attempt.uncached = uncached

    def _compute(self, attempt: Attempt, more: int) -> None:
        self.backlog += more
        if attempt.resumes:
            self.resuming += more

    def remove(self, attempt: Attempt) -> None:
        """Do not count an attempt any more."""
        self.begun(attempt)
        del self.attempts[attempt.number]
        self.tokens -= attempt.tokens
        take_away(self.pages, attempt.pages)


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
        """How many of a prompt's first pages are there."""
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
