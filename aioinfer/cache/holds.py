"""Holds: marks on cached prefixes that somebody will come back to; their pages are evicted after all others.

A hold is no lock: its pages can be had by any request that finds no others, so holds delay nothing and keep
nothing from being admitted. What is left of its prefix, a hold knows::

    root ─── [system prompt: 4 pages] ──┬── [question A: 2 pages] ◄ hold of 6 pages
               held 2                   │     held 1
                                        └── [question B: 1 page]   evicted before all that is held
                                              held 0

Each node counts the holds that end at it or below it, so a leaf knows at once whether it is held. A hold ends
at the end of a node, and moves to the parent when its node leaves the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioinfer.cache.nodes import Hold, Node, upwards

__all__ = ["Holds"]


class Holds:
    """The holds of one tree, which reports what it does to its nodes."""

    __slots__ = ("_stateful", "lost", "number", "pages")

    def __init__(self, *, stateful: bool = False) -> None:
        self._stateful = stateful
        #: holds of which something is left
        self.number = 0
        #: pages that they hold, each counted once
        self.pages = 0
        #: pages that left the tree while they were held, since the start
        self.lost = 0

    def take(self, node: Node | None) -> Hold:
        """A new hold on the prefix that ends at a node; on nothing at None and at a root."""
        if node is None or node.parent is None:
            return Hold(None, stateful=self._stateful)
        hold = Hold(node, stateful=self._stateful)
        for each in upwards(node):
            if not each.held:
                self.pages += len(each.pages)
            each.held += 1
        if node.ends is None:
            node.ends = set()
        node.ends.add(hold)
        self.number += 1
        return hold

    def release(self, hold: Hold) -> Node | None:
        """End a hold; returns the node where it ended. None, and no effect, if nothing was left of it."""
        node, hold.node = hold.node, None
        if node is None:
            return None
        assert node.ends is not None
        node.ends.remove(hold)
        self.number -= 1
        for each in upwards(node):
            each.held -= 1
            if not each.held:
                self.pages -= len(each.pages)
        return node

    def cut(self, node: Node, count: int) -> None:
        """The last ``count`` pages of a node leave the tree."""
        if node.held:
            self.pages -= count
            self.lost += count

    def leave(self, node: Node) -> None:
        """A leaf leaves the tree after its pages: its holds end at its parent now."""
        if not node.held:
            return
        parent, ends = node.parent, node.ends
        assert parent is not None
        assert ends is not None
        node.held, node.ends = 0, None
        if parent.parent is None:
            self._nothing_left(ends)
            parent.held -= len(ends)
            return
        for hold in ends:
            hold.node = parent
        parent.ends = ends if parent.ends is None else parent.ends | ends

    def flush(self, nodes: Iterable[Node]) -> None:
        """All of these nodes leave the tree: nothing is left of any hold."""
        self.lost += self.pages
        self.pages = 0
        for node in nodes:
            self._nothing_left(node.ends or ())
            node.held, node.ends = 0, None

    def _nothing_left(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            hold.node = None
            self.number -= 1

    # -- checks ---------------------------------------------------------------------------------

    def check(self, num_pages: int) -> None:
        """Assert what can be asserted in O(1) of a tree with ``num_pages``."""
        assert 0 <= self.pages <= num_pages, f"{self.pages} of {num_pages} pages held"
        assert self.number >= 0
        assert bool(self.number) == bool(self.pages), f"{self.number} holds on {self.pages} pages"

    def audit(self, nodes: Sequence[Node]) -> None:
        """Assert that the counts are those of the holds; ``nodes``: all of a tree, the detached included."""
        counted = dict.fromkeys(nodes, 0)
        number = 0
        for node in nodes:
            for hold in node.ends or ():
                number += 1
                assert hold.node is node, "a hold ends elsewhere"
                assert not node.detached, "a hold ends where nothing is matched"
                for each in upwards(node):
                    counted[each] += 1
        assert number == self.number, f"{self.number} holds counted, {number} found"
        for node, held in counted.items():
            assert node.held == held, f"{node.held} holds counted on a node, {held} found"
        assert self.pages == sum(len(node.pages) for node in nodes if node.held)
