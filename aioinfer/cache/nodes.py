"""Node, Hold and Snapshot: what the prefix tree is made of."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

__all__ = ["Hold", "Node", "Snapshot", "upwards"]


class Node:
    """A run of pages below its parent; roots have no pages. Only the tree changes it."""

    __slots__ = ("children", "detached", "ends", "entry", "fence", "held", "key", "locks", "namespace",
                 "pages", "parent", "snapshot", "stamp")  # fmt: skip

    def __init__(self, parent: Node | None, key: bytes, pages: list[int], namespace: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.namespace = namespace
        #: by the key of the first page of each child
        self.children: dict[bytes, Node] = {}
        #: locks on this node and on all below it
        self.locks = 0
        #: the same of holds, and the holds whose prefix ends here
        self.held = 0
        self.ends: set[Hold] | None = None
        #: logical time of the last use
        self.stamp = 0
        #: number of its newest entry in the order of eviction
        self.entry = 0
        #: the newest launched step that may read these pages, of all locks that were released
        self.fence = 0
        #: no longer matched; its pages leave the tree when the last lock is released
        self.detached = False
        #: of the recurrent state after its last token, in a :class:`~aioinfer.cache.snapshots.SnapshotTree`
        self.snapshot: Snapshot | None = None


class Hold:
    """A hold on a prefix, made and released by the tree."""

    __slots__ = ("_stateful", "node")

    def __init__(self, node: Node | None, *, stateful: bool) -> None:
        #: where what is left of the prefix ends; None: nothing is left, or it was released
        self.node = node
        #: the model has recurrent state: what comes after the last snapshot is of no use
        self._stateful = stateful

    @property
    def num_pages(self) -> int:
        """Pages of the prefix that are cached still, from position 0 on, and can be used. O(depth)."""
        node = self.node
        if self._stateful:
            node = next((each for each in upwards(node) if each.snapshot is not None), None)
        return sum(len(each.pages) for each in upwards(node))

    @property
    def stamp(self) -> int:
        """Logical time of the last use of the whole prefix; 0 if nothing is left."""
        return 0 if self.node is None else self.node.stamp


class Snapshot:
    """A recurrent state that was kept: private to the request that computes it, or carried by a node."""

    __slots__ = ("fence", "item", "node", "position", "readers")

    def __init__(self, item: int, position: int) -> None:
        #: of the pool
        self.item = item
        #: tokens that it stands for
        self.position = position
        #: the node that carries it; None while it is private
        self.node: Node | None = None
        #: requests whose next row starts from it
        self.readers = 0
        #: the newest launched step that writes or reads it
        self.fence = 0


def upwards(node: Node | None) -> Iterator[Node]:
    """The node and its ancestors, the root included."""
    while node is not None:
        yield node
        node = node.parent
