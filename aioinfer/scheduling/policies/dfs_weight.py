"""Depth-first order of the prefix tree, heaviest branch first."""

from __future__ import annotations

from collections import Counter

from aioinfer.cache.nodes import Node
from aioinfer.scheduling.policy import CacheAware
from aioinfer.scheduling.sequence import Sequence

__all__ = ["DfsWeight"]


class DfsWeight(CacheAware):
    """Depth first through the tree of prefixes, branches with most waiting requests first, so that those
    that share a prefix follow each other."""

    def arrange(self) -> list[Sequence]:
        at: dict[Node | None, list[Sequence]] = {}
        weight: Counter[Node] = Counter()
        below: dict[Node | None, dict[Node, None]] = {}
        for sequence in self:
            node = self.match(sequence)
            at.setdefault(node, []).append(sequence)
            while node is not None:
                weight[node] += 1
                below.setdefault(node.parent, {})[node] = None
                node = node.parent
        arranged: list[Sequence] = []
        stack: list[Node | None] = [None]
        while stack:
            here = stack.pop()
            arranged += at.get(here, [])
            # The heaviest comes last onto the stack and first off it; among equals the one met first.
            branches = list(below.get(here, {}))[::-1]
            branches.sort(key=weight.__getitem__)
            stack += branches
        return arranged

    def match(self, sequence: Sequence) -> Node | None:
        return self._memory.lookup(sequence)[1]
