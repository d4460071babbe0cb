"""StopMatcher: finds stop strings in streamed text and holds back possible prefixes only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """An Aho-Corasick automaton (Aho and Corasick, 1975) over the stop strings.

    Linear in the text, and independent of how the text is split. The match that ends first wins; of several
    that end at the same character, the longest. The held text is the longest suffix of the text that is a
    proper prefix of a stop string.
    """

    __slots__ = ("_depth", "_edges", "_ended", "_fail", "_first", "_held", "_hit", "_node", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would end every text at its start."""
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._hit: list[str | None] = [None]
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty")
            node = 0
            for character in stop:
                node = self._child(node, character)
            self._hit[node] = stop
        self._first = frozenset(self._edges[0])
        self._fail = [0] * len(self._edges)
        self._link_failures()
        self._node = 0
        self._held = ""
        self._ended = False
        #: the text of the match
        self.matched = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Append text: returns the text to release, and the stop string that it completed, if any.

        After a match nothing is released and nothing is found.
        """
        node = self._node
        if not node and self._first.isdisjoint(text):
            return ("", None) if self._ended else (text, None)
        if self._ended:
            return "", None
        held = self._held + text
        hits, edges = self._hit, self._edges
        for end, character in enumerate(text, len(self._held) + 1):
            node = edges[node].get(character) or self._step(node, character)
            stop = hits[node]
            if stop is not None:
                self._ended, self._held, self._node = True, "", 0
                self.matched = stop
                return held[: end - len(stop)], stop
        safe = len(held) - self._depth[node]
        self._node, self._held = node, held[safe:]
        return held[:safe], None

    @property
    def held(self) -> str:
        """The held text: a possible prefix of a stop string."""
        return self._held

    def flush(self) -> str:
        """End of the output: the held text; empty after a match."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _child(self, node: int, character: str) -> int:
        child = self._edges[node].get(character)
        if child is None:
            child = len(self._edges)
            self._edges[node][character] = child
            self._edges.append({})
            self._depth.append(self._depth[node] + 1)
            self._hit.append(None)
        return child

    def _step(self, node: int, character: str) -> int:
        """The node after ``character``: the longest prefix of a stop string that ends here."""
        while character not in self._edges[node]:
            if node == 0:
                return 0
            node = self._fail[node]
        return self._edges[node][character]

    def _link_failures(self) -> None:
        """Link each node to the node of its longest proper suffix; hits propagate along the links."""
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._edges[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                queue.append(child)
            if self._hit[node] is None:
                self._hit[node] = self._hit[self._fail[node]]
