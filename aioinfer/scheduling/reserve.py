"""Reserve: pages that admission keeps back for the tokens that running requests may still generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer.cache.nodes import Node
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig

__all__ = ["NewTokenRatio", "Outlook", "Reserve"]


class NewTokenRatio:
    """Which share of the tokens they may still generate running requests are expected to use.

    Pages for that share are kept free at admission. A retraction shows that it was too small: it then
    rises half-way to one, and decays from there step by step. An idle engine begins anew. (The idea is
    SGLang's.)
    """

    __slots__ = ("_decay", "_first", "_least", "value")

    def __init__(self, config: EngineConfig) -> None:
        self.value = self._first = max(config.new_token_ratio, config.min_new_token_ratio)
        self._least = config.min_new_token_ratio
        self._decay = config.new_token_ratio_decay

    def decay(self) -> None:
        self.value = max(self._least, self.value - self._decay)

    def rise(self) -> None:
        self.value += (1 - self.value) / 2

    def reset(self) -> None:
        """Forget what was learned from requests that are gone."""
        self.value = self._first


class Reserve:
    """Pages that running requests may still need, by their number and the tokens that may still come."""

    __slots__ = ("_clip", "_memory", "_ratio", "_running", "_tokens")

    def __init__(self, memory: Memory, ratio: float, clip: int, running: int, tokens: int) -> None:
        """``tokens``: of all ``running`` requests, each counted with at most ``clip``."""
        self._memory = memory
        self._ratio = ratio
        self._clip = clip
        self._running = running
        self._tokens = tokens

    def copy(self) -> Reserve:
        return Reserve(self._memory, self._ratio, self._clip, self._running, self._tokens)

    def add(self, sequence: Sequence) -> None:
        """The request runs, too."""
        self._running += 1
        self._tokens += self.may_generate(sequence)

    def discount(self, sequence: Sequence) -> None:
        """The request is one of them, and runs no longer."""
        self._running -= 1
        self._tokens -= self.may_generate(sequence)

    def may_generate(self, sequence: Sequence) -> int:
        """Tokens that may still come for a request, as far as they are counted."""
        return max(0, min(sequence.cursor.remaining, self._clip))

    def pages(self, sequence: Sequence | None = None) -> int:
        """Pages that must be left, besides those of a request that is to be admitted. An empty engine admits
        whatever fits."""
        if not self._running:
            return 0
        tokens = self._tokens + (0 if sequence is None else self.may_generate(sequence))
        return max(self._running, self._memory.pages.pages_for(int(tokens * self._ratio)))


class Outlook:
    """The pages as they would be if waiting requests were admitted one after the other.

    Never too optimistic: a cached prefix that is locked by an admission is no longer there to be evicted.
    """

    __slots__ = ("_left", "_locked", "_memory", "_reserve")

    def __init__(self, memory: Memory, reserve: Reserve) -> None:
        self._memory = memory
        self._reserve = reserve.copy()
        self._left = memory.available
        self._locked: set[Node] = set()

    def admits(self, sequence: Sequence) -> bool:
        """Whether the next one finds its pages; it is counted as admitted then."""
        hit, node = self._memory.lookup(sequence)
        need = self._memory.pages.pages_for(sequence.length) - hit
        if node is not None and not node.locks and node not in self._locked:
            self._locked.add(node)
            need += hit
        if need + self._reserve.pages(sequence) > self._left:
            return False
        self._left -= need
        self._reserve.add(sequence)
        return True

    def claim(self, sequence: Sequence, leader: Sequence) -> None:
        """Count a request that waits for a prefix of ``leader``: as admitted, with the pages that it cannot
        have in common with it."""
        pages = self._memory.pages.pages_for
        self._left -= max(1, pages(sequence.length) - pages(leader.length))
        self._reserve.add(sequence)
