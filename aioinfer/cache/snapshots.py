"""Snapshots: recurrent states at the end of cached prefixes, and the prefix tree that carries them.

KV of a prefix can be used up to any position. A recurrent state cannot be taken back: of a prefix whose state
was kept at some positions, the longest of these is what can be used::

    root ─── [system prompt: 4 pages] ●──┬── [question A: 2 pages] ●── [answer A: 3 pages]
                                         └── [question B: 1 page]        ● a snapshot, at the end of a node

A request that begins with the system prompt, question A and answer A finds six pages: after them are three
more, but no state. It computes these again, and leaves a snapshot where the match ended, for the next one.

Where snapshots are taken, and that they are few, is from Marconi (arXiv 2411.19379).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from aioinfer.cache.fenced import CachedPool
from aioinfer.cache.holds import Holds
from aioinfer.cache.namespace import COMMON
from aioinfer.cache.nodes import Node, Snapshot, upwards
from aioinfer.cache.radix import Lock, RadixTree

__all__ = ["SnapshotPool", "SnapshotTree"]


class SnapshotPool(CachedPool):
    """Items ``1 .. total``, one per snapshot that can be kept. The cached ones can be had again, least
    recently used first."""

    __slots__ = ("_used",)

    def __init__(self, total: int) -> None:
        super().__init__(total)
        #: cached ones, least recently used first
        self._used: dict[Snapshot, None] = {}

    def used(self, snapshot: Snapshot) -> None:
        """A cached snapshot is used."""
        self._used[snapshot] = self._used.pop(snapshot)

    def oldest(self) -> Snapshot | None:
        """The least recently used one that no request and no step in flight needs; one of a prefix that is
        held only if there is no other."""
        resolved, held = self.last_resolved, None
        for snapshot in self._used:
            if snapshot.readers or snapshot.fence > resolved:
                continue
            if snapshot.node is None or not snapshot.node.held:
                return snapshot
            held = held or snapshot
        return held

    def cached_snapshots(self) -> list[Snapshot]:
        """Least recently used first."""
        return list(self._used)

    def cache(self, snapshot: Snapshot) -> None:
        """A private snapshot, written by a step that has resolved, belongs to the cache from now on."""
        self.keep(1)
        self._used[snapshot] = None

    def uncache(self, snapshot: Snapshot) -> None:
        """It does not any more."""
        self.drop([snapshot.item], snapshot.fence)
        del self._used[snapshot]

    def check(self) -> None:
        super().check()
        assert len(self._used) == self.cached, f"{len(self._used)} snapshots, {self.cached} counted"


class SnapshotTree(RadixTree):
    """A prefix tree for a model with recurrent state. :meth:`find`, :meth:`lock` and :meth:`hold` stop at the
    deepest snapshot; :meth:`match` does not."""

    __slots__ = ("page_size", "pool")

    def __init__(self, page_size: int, pool: SnapshotPool) -> None:
        super().__init__(page_size)
        self.page_size = page_size
        self.pool = pool
        self.holds = Holds(stateful=True)

    def find(self, key: bytes, namespace: Hashable = COMMON) -> tuple[int, Node | None]:
        root = self._roots.get(namespace)
        if root is None:
            return 0, None
        node, matched = self._usable(root, key)
        return matched // self._page_bytes, node

    def _usable(self, root: Node, key: bytes) -> tuple[Node, int]:
        """The deepest node with a snapshot that ``key`` matches to its end, or the root; and the bytes of
        ``key`` up to there."""
        node, common, matched = self._walk(root, key)
        if common < len(node.key):
            assert node.parent is not None
            node, matched = node.parent, matched - common
        while node.parent is not None and node.snapshot is None:
            node, matched = node.parent, matched - len(node.key)
        return node, matched

    def deepest(self, lock: Lock, pages: int | None = None) -> tuple[int, Node]:
        """Number of pages up to the deepest snapshot of a locked prefix, or of its first ``pages``, and
        the node that carries it; none and the root if there is no snapshot."""
        end = lock.num_pages
        for node in upwards(lock.node):
            if node.parent is None or (node.snapshot is not None and (pages is None or end <= pages)):
                return end, node
            end -= len(node.pages)
        raise AssertionError("a path without a root")

    def shorten(self, lock: Lock, pages: int, top: Node, fence: int) -> list[tuple[list[int], int]]:
        """Release the end of a locked prefix: after its first ``pages``, which end with node ``top``.
        ``fence`` and what is returned: as for :meth:`unlock`."""
        node = lock.node
        lock._node = top
        lock.num_pages = pages
        return self._let_go(node, top, fence)

    # -- snapshots ------------------------------------------------------------------------------

    def attach(self, snapshot: Snapshot, lock: Lock) -> bool:
        """Let the node at the end of a locked prefix carry a snapshot, whose step has resolved. False if it
        cannot: the prefix ends elsewhere or is matched no more, or another request was faster."""
        node = lock.node
        if lock.num_pages * self.page_size != snapshot.position:
            return False
        if node.parent is None or node.detached or node.snapshot is not None:
            return False
        self.pool.cache(snapshot)
        node.snapshot, snapshot.node = snapshot, node
        self.version += 1
        return True

    def make_room(self) -> bool:
        """Whether an item of the pool is free now; the least recently used snapshot is given up for it."""
        if self.pool.free:
            return True
        oldest = self.pool.oldest()
        if oldest is None:
            return False
        assert oldest.node is not None
        self._lose_end(oldest.node)
        self.version += 1
        return self.pool.free > 0

    def _lose_end(self, node: Node) -> None:
        snapshot = node.snapshot
        if snapshot is not None:
            # First what may raise: a snapshot that the pool knows has a node.
            self.pool.uncache(snapshot)
            node.snapshot = snapshot.node = None

    # -- checks ---------------------------------------------------------------------------------

    def _audit_nodes(self, nodes: Sequence[Node]) -> None:
        carried = [node.snapshot for node in nodes if node.snapshot is not None]
        for node in nodes:
            if node.snapshot is not None:
                assert node.snapshot.node is node, "a snapshot is carried by two nodes"
                pages = sum(len(each.pages) for each in upwards(node))
                assert pages * self.page_size == node.snapshot.position, "a snapshot is not at the end"
        assert set(carried) == set(self.pool.cached_snapshots()), "a cached snapshot has no node"
