"""StopStrings: an automaton of stop strings, for all outputs that have the same; StopMatcher: one output."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from weakref import WeakValueDictionary

__all__ = ["StopMatcher", "StopStrings", "TooSlow"]

#: the automata in use, by their strings
_in_use: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


class TooSlow(TimeoutError):
    """A stop pattern needs more CPU time for a piece of text than it may have."""


class StopStrings:
    """An Aho-Corasick automaton (Aho and Corasick, 1975) over stop strings, linked as the texts reach it.

    A node is a prefix of a stop string, the root 0 the empty one. The strings are sorted, and the nodes that
    a string does not share with the one before it are numbered in a row: from most nodes the only way leads
    to the next number. So memory is a character and a link of four bytes per node, construction is a few
    operations per string, and all else is done for a node when a text first reaches it.
    """

    __slots__ = ("__weakref__", "_branches", "_ends", "_firsts", "_links", "_next", "_shared", "first")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would end every text at its start."""
        #: node -> character -> node, where more than one character leads on, and of the root
        self._branches: dict[int, dict[str, int]] = {0: {}}
        #: nodes at which a stop string ends -> the longest such string, as far as they are linked
        self._ends: dict[int, str] = {}
        #: by string: its first own node, and the number of characters that it shares
        self._firsts: list[int] = []
        self._shared: list[int] = []
        #: the character that leads from a node to the next number
        self._next = "\0"
        previous = ""
        for stop in sorted(set(stops)):
            if not stop:
                raise ValueError("a stop string is empty")
            # A string that continues another is never completed.
            if not (previous and stop.startswith(previous)):
                self._add(stop, _common(previous, stop))
                previous = stop
        #: the node of the longest proper suffix that is a node; -1: not linked yet
        self._links = array("i", [-1]) * len(self._next)
        self._links[0] = 0
        #: the characters with which a stop string begins
        self.first = frozenset(self._branches[0])

    @classmethod
    def of(cls, stops: Sequence[str]) -> StopStrings:
        """The automaton that others with equal strings have, too, while any of them is in use."""
        key = tuple(stops)
        found = _in_use.get(key)
        if found is None:
            found = _in_use[key] = cls(key)
        return found

    def advance(self, node: int, text: str) -> tuple[int, int, str | None]:
        """From ``node`` through the text, up to the first end of a stop string.

        Returns the node reached, and how many characters up to the end of which string, if one ends.
        """
        following, links, ends = self._next, self._links, self._ends
        for at, character in enumerate(text, 1):
            if node and following[node] == character:
                child = node + 1
            else:
                while not (child := self._child(node, character)) and node:
                    node = links[node]
            if links[child] < 0:
                self._link(node, character, child)
            node = child
            if node in ends:
                return node, at, ends[node]
        return node, len(text), None

    def depth(self, node: int) -> int:
        """Characters of the prefix that the node stands for."""
        if not node:
            return 0
        string = bisect_right(self._firsts, node) - 1
        return node - self._firsts[string] + self._shared[string] + 1

    def _add(self, stop: str, shared: int) -> None:
        """Append the nodes of a string that shares ``shared`` characters with the one before it."""
        branch, first = self._at(shared), len(self._next)
        self._branches.setdefault(branch, {})[stop[shared]] = first
        self._firsts.append(first)
        self._shared.append(shared)
        # The last node is an end, from which no way is looked for.
        self._next += stop[shared + 1 :] + "\0"
        self._ends[len(self._next) - 1] = stop

    def _at(self, depth: int) -> int:
        """The node of the newest string at a depth."""
        string = len(self._firsts) - 1
        while depth and depth <= self._shared[string]:
            string -= 1
        return self._firsts[string] + depth - self._shared[string] - 1 if depth else 0

    def _child(self, node: int, character: str) -> int:
        """The node that a character leads to from a node that is no end, or 0."""
        if node and self._next[node] == character:
            return node + 1
        branch = self._branches.get(node)
        return 0 if branch is None else branch.get(character, 0)

    def _link(self, node: int, character: str, child: int) -> None:
        """Link a child of ``node``, which is linked, and all of its suffixes."""
        links, ends = self._links, self._ends
        new = []
        while links[child] < 0:
            suffix, parent = 0, node
            while parent and not suffix:
                parent = links[parent]
                suffix = self._child(parent, character)
            new.append((child, suffix))
            node, child = parent, suffix
        # Shortest first, so that a linked node always has linked suffixes: another thread may match, too.
        for child, suffix in reversed(new):
            if suffix in ends:
                ends.setdefault(child, ends[suffix])
            links[child] = suffix


class StopMatcher:
    """Finds stop strings in streamed text and holds back possible prefixes only.

    Linear in the text, and independent of how the text is split. The match that ends first wins; of several
    that end at the same character, the longest. The held text is the longest suffix of the text that is a
    proper prefix of a stop string.
    """

    __slots__ = ("_ended", "_held", "_node", "_strings", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError as :class:`StopStrings` does."""
        self._strings = StopStrings.of(stops)
        self._node = 0
        self._held = ""
        self._ended = False
        #: the text of the match
        self.matched = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Append text: returns the text to release, and the stop string that it completed, if any.

        After a match nothing is released and nothing is found.
        """
        if not self._node and self._strings.first.isdisjoint(text):
            return ("", None) if self._ended else (text, None)
        if self._ended:
            return "", None
        node, end, stop = self._strings.advance(self._node, text)
        held = self._held + text
        if stop is not None:
            safe = held[: len(self._held) + end - len(stop)]
            self._ended, self._held, self._node = True, "", 0
            self.matched = stop
            return safe, stop
        cut = len(held) - self._strings.depth(node)
        self._node, self._held = node, held[cut:]
        return held[:cut], None

    @property
    def held(self) -> str:
        """The held text: a possible prefix of a stop string."""
        return self._held

    def flush(self) -> str:
        """End of the output: the held text; empty after a match."""
        held, self._held, self._node = self._held, "", 0
        return held


def _common(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
