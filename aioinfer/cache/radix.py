"""RadixTree: the prefix cache, which finds the KV pages of computed prefixes by their tokens.

A node holds a run of pages and the tokens on them; the path from a root is a prefix. Two prefixes share the
nodes of their common pages and diverge at a page boundary::

    root ─── [system prompt: 4 pages] ──┬── [question A: 2 pages] ─── [answer A: 3 pages]
               locks 2                  │     locks 1                   locks 1
                                        └── [question B: 1 page]
                                              locks 1

A request that reads a prefix has a :class:`Lock` on its deepest node, which counts on every node up to the
root; pages of a node without locks may be evicted, leaves first, least recently used first, and what is held
(:mod:`aioinfer.cache.holds`) after all else. This is the data structure of RadixAttention (SGLang, arXiv
2312.07104); keys here are bytes, so that a whole run is compared at once.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

from aioinfer.cache.holds import Holds
from aioinfer.cache.namespace import COMMON
from aioinfer.cache.nodes import Hold, Node, upwards

__all__ = ["Lock", "RadixTree", "token_key"]

_TOKEN_BYTES = 4
#: added to the time of use of what is held, in the order of eviction
_HELD = 1 << 62


def token_key(ids: Iterable[int]) -> bytes:
    """Token ids as a key: four bytes each. Raises OverflowError for an id that does not fit 31 bits."""
    return array("i", ids).tobytes()


class Lock:
    """A lock on a prefix: its pages are not evicted. :meth:`RadixTree.unlock` releases it, exactly once."""

    __slots__ = ("_node", "num_pages")

    def __init__(self, node: Node, num_pages: int) -> None:
        self._node: Node | None = node
        #: length of the locked prefix in pages
        self.num_pages = num_pages

    @property
    def node(self) -> Node:
        """The deepest node of the prefix. Raises RuntimeError if the lock was released."""
        if self._node is None:
            raise RuntimeError("this lock was released already")
        return self._node

    def pages(self) -> list[int]:
        """The pages of the locked prefix, from position 0 on."""
        runs = [node.pages for node in upwards(self.node)]
        return [page for run in reversed(runs) for page in run]


class RadixTree:
    """Prefixes of whole pages, by namespace and tokens. Keys are made by :func:`token_key`.

    Matching costs O(pages matched), locking O(depth), eviction O(log nodes) per node; only :meth:`flush` and
    :meth:`audit` walk the whole tree.
    """

    __slots__ = (
        "_clock",
        "_heap",
        "_numbers",
        "_page_bytes",
        "_roots",
        "evictable",
        "holds",
        "num_locks",
        "num_nodes",
        "num_pages",
        "version",
    )

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[Hashable, Node] = {}
        #: (order, number, node) of leaves that had no lock when they were added; stale entries are skipped
        self._heap: list[tuple[int, int, Node]] = []
        self._numbers = itertools.count(1)
        self._clock = 0
        self.holds = Holds()
        #: locks that are held
        self.num_locks = 0
        #: nodes that are not roots
        self.num_nodes = 0
        #: pages that the tree owns
        self.num_pages = 0
        #: pages of nodes without locks
        self.evictable = 0
        #: changes whenever the result of a match may change, in its length or in its node
        self.version = 0

    # -- reading --------------------------------------------------------------------------------

    def match(self, key: bytes, namespace: Hashable = COMMON) -> int:
        """The number of pages of ``key`` in the tree. Does not count as a use."""
        root = self._roots.get(namespace)
        return 0 if root is None else self._walk(root, key)[2] // self._page_bytes

    def find(self, key: bytes, namespace: Hashable = COMMON) -> tuple[int, Node | None]:
        """The number of pages that :meth:`lock` would lock, and the node in which they end, perhaps within
        it.

        The node is the root if nothing matches, and None if the namespace is empty.
        """
        root = self._roots.get(namespace)
        if root is None:
            return 0, None
        node, _, matched = self._walk(root, key)
        return matched // self._page_bytes, node

    def lock(self, key: bytes, namespace: Hashable = COMMON) -> Lock:
        """Lock the longest prefix of ``key`` in the tree, which may be empty."""
        return self._lock_at(*self._usable(self._root(namespace), key))

    def _root(self, namespace: Hashable) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", [], namespace)
            self.version += 1
        return root

    def _usable(self, root: Node, key: bytes) -> tuple[Node, int]:
        """The node with which the longest prefix of ``key`` ends that can be used, and its bytes."""
        return self._whole(root, key)

    def _whole(self, root: Node, key: bytes) -> tuple[Node, int]:
        """The same of the longest prefix in the tree."""
        node, common, matched = self._walk(root, key)
        if common < len(node.key):
            node = self._split(node, common)
        return node, matched

    def lock_node(self, node: Node) -> Lock:
        """Lock the prefix that ends with a node. Raises RuntimeError: it is not matched any more."""
        if node.detached or node.stamp < 0:
            raise RuntimeError("this node has left the tree")
        return self._lock_at(node, sum(len(each.key) for each in upwards(node)))

    def _lock_at(self, node: Node, matched: int) -> Lock:
        self._count_lock(node, None)
        self.num_locks += 1
        return Lock(node, matched // self._page_bytes)

    def _walk(self, node: Node, key: bytes) -> tuple[Node, int, int]:
        """The deepest node below ``node`` that matches, and the matched bytes of its own key and of
        ``key``."""
        at, unit = 0, self._page_bytes
        own = len(node.key)
        while (child := node.children.get(key[at : at + unit])) is not None:
            own = len(child.key)
            if not key.startswith(child.key, at):
                common = self._common(child.key, key, at)
                return child, common, at + common
            at += own
            node = child
        return node, own, at

    def _common(self, run: bytes, key: bytes, at: int) -> int:
        """Bytes of the whole pages that ``run`` and ``key[at:]`` share. They share the first page at
        least."""
        low, high = 1, len(run) // self._page_bytes - 1
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(run[: middle * self._page_bytes], at):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after ``at`` bytes of its key; returns the new upper half. Both keep its locks and are
        held as it was."""
        parent, pages = node.parent, at // self._page_bytes
        assert parent is not None
        upper = Node(parent, node.key[:at], node.pages[:pages], node.namespace)
        upper.locks, upper.stamp, upper.fence = node.locks, node.stamp, node.fence
        upper.held = node.held
        parent.children[self._edge(upper)] = upper
        node.parent, node.key, node.pages = upper, node.key[at:], node.pages[pages:]
        upper.children[self._edge(node)] = node
        self.num_nodes += 1
        self.version += 1
        return upper

    def _count_lock(self, node: Node, top: Node | None) -> None:
        """Count a lock on ``node`` and its ancestors, up to and without ``top``."""
        self._clock += 1
        for each in upwards(node):
            if each is top:
                return
            if not each.locks:
                self.evictable -= len(each.pages)
            each.locks += 1
            each.stamp = self._clock

    # -- writing --------------------------------------------------------------------------------

    def extend(self, lock: Lock, key: bytes, pages: Sequence[int]) -> list[int]:
        """Add the ``pages`` that follow a locked prefix, and extend the lock to them.

        Args:
            lock: a lock on the prefix.
            key: the tokens on ``pages``, whole pages only.
            pages: pages of the caller, complete and resolved.

        Returns:
            the pages that the tree now has for these tokens: the caller's, or others if another request added
            the same tokens before. The caller keeps those of ``pages`` that are not among them. If the prefix
            was flushed meanwhile, all of ``pages``: nothing was added.
        """
        start = lock.node
        if start.detached:
            return list(pages)
        node, common, matched = self._walk(start, key)
        if common < len(node.key):
            node = self._split(node, common)
        known = matched // self._page_bytes
        if known < len(pages):
            node = self._append(node, key[matched:], list(pages[known:]))
        self._count_lock(node, start)
        lock._node = node
        lock.num_pages += len(pages)
        runs = []
        for each in upwards(node):
            if each is start:
                break
            runs.append(each.pages)
        return [page for run in reversed(runs) for page in run]

    def _append(self, parent: Node, key: bytes, pages: list[int]) -> Node:
        node = Node(parent, key, pages, parent.namespace)
        parent.children[self._edge(node)] = node
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.evictable += len(pages)
        self.version += 1
        return node

    def _edge(self, node: Node) -> bytes:
        return node.key[: self._page_bytes]

    # -- releasing ------------------------------------------------------------------------------

    def unlock(self, lock: Lock, fence: int) -> list[tuple[list[int], int]]:
        """Release a lock. ``fence`` is the newest launched step in which its holder read the pages.

        Returns the runs of pages, with their fences, that left the tree with this lock because they had been
        flushed or forgotten. Raises RuntimeError for a lock that was released already.
        """
        node = lock.node
        lock._node = None
        self.num_locks -= 1
        return self._let_go(node, None, fence)

    def _let_go(self, node: Node, top: Node | None, fence: int) -> list[tuple[list[int], int]]:
        """Count off a lock on ``node`` and its ancestors, up to and without ``top``; returns as
        :meth:`unlock` does."""
        self._clock += 1
        gone = []
        for each in upwards(node):
            if each is top:
                break
            each.locks -= 1
            each.stamp = self._clock
            each.fence = max(each.fence, fence)
            if each.locks:
                continue
            if each.detached:
                self._drop(each)
                if each.pages:
                    gone.append((each.pages, each.fence))
            else:
                self.evictable += len(each.pages)
                self._offer(each)
        return gone

    def forget(self, lock: Lock, beside: Iterable[Lock] = ()) -> None:
        """Remove from later matches the end of the lock's prefix that no other lock holds and that has no
        other children. Locks ``beside`` it do not count."""
        counted = Counter(node for each in beside for node in upwards(each.node))
        for node in upwards(lock.node):
            if node.parent is None or node.detached or node.locks - counted[node] > 1 or node.children:
                return
            node.detached = True
            del node.parent.children[self._edge(node)]
            self._unhold(node)
            self.version += 1

    def forget_key(
        self, key: bytes, namespace: Hashable = COMMON, beside: Iterable[Lock] = ()
    ) -> list[tuple[list[int], int]]:
        """Remove from later matches what is found of ``key``, as :meth:`forget` does; returns as
        :meth:`unlock` does."""
        lock = self._lock_at(*self._whole(self._root(namespace), key))
        self.forget(lock, beside)
        return self.unlock(lock, 0)

    # -- holding --------------------------------------------------------------------------------

    def hold(self, key: bytes, namespace: Hashable = COMMON) -> Hold:
        """Hold the longest prefix of ``key`` that can be used, which may be empty. Counts as a use."""
        root = self._roots.get(namespace)
        return self._hold_at(None if root is None else self._usable(root, key)[0])

    def hold_again(self, hold: Hold) -> Hold:
        """Another hold on what is left of a prefix. O(depth)."""
        return self._hold_at(hold.node)

    def _hold_at(self, node: Node | None) -> Hold:
        hold = self.holds.take(node)
        if hold.node is not None:
            self._clock += 1
            for each in upwards(node):
                each.stamp = self._clock
            self._offer(hold.node)
        return hold

    def release_hold(self, hold: Hold) -> None:
        """End a hold; its prefix stays cached as others do. Idempotent. O(depth)."""
        node = self.holds.release(hold)
        if node is not None:
            self._offer(node)

    def _unhold(self, node: Node) -> None:
        """A leaf is no longer matched."""
        self.holds.cut(node, len(node.pages))
        self.holds.leave(node)

    # -- evicting -------------------------------------------------------------------------------

    def evict(self, count: int, resolved: int) -> list[int]:
        """Remove up to ``count`` pages from the tree and return them: least recently used first, and held
        ones after all others.

        Stops before a page that a launched step newer than ``resolved`` may still read; a step or two later
        it can be evicted. Runs are cut from their end.
        """
        taken: list[int] = []
        while len(taken) < count and self._heap:
            _, number, node = self._heap[0]
            if not _is_spare(node, number):
                heapq.heappop(self._heap)
                continue
            if node.fence > resolved:
                break
            self._lose_end(node)
            keep = max(0, len(node.pages) - (count - len(taken)))
            taken += reversed(node.pages[keep:])
            self.evictable -= len(node.pages) - keep
            self.holds.cut(node, len(node.pages) - keep)
            self.version += 1
            if keep:
                self.num_pages -= len(node.pages) - keep
                node.key, node.pages = node.key[: keep * self._page_bytes], node.pages[:keep]
                continue
            heapq.heappop(self._heap)
            parent = node.parent
            assert parent is not None
            del parent.children[self._edge(node)]
            self.holds.leave(node)
            self._drop(node)
            self._offer(parent)
        return taken

    def flush(self) -> list[tuple[list[int], int]]:
        """Empty the tree: nothing cached so far is matched again. O(nodes).

        Returns the runs of pages, with their fences, that the caller now owns; :meth:`unlock` returns those
        that are still locked.
        """
        gone, nodes = [], list(self._nodes())
        self.holds.flush(nodes)
        for node in nodes:
            if node.locks:
                node.detached = True
                node.children = {edge: child for edge, child in node.children.items() if child.locks}
            else:
                self._drop(node)
                if node.pages:
                    gone.append((node.pages, node.fence))
        self._roots.clear()
        self._heap.clear()
        self.evictable = 0
        self.version += 1
        return gone

    def _offer(self, node: Node) -> None:
        """A node lost its last lock or child: make it evictable, or remove it if it is a root."""
        if node.children or node.locks:
            return
        if node.parent is None:
            if self._roots.get(node.namespace) is node:
                del self._roots[node.namespace]
                self.version += 1
            return
        if len(self._heap) > 2 * self.num_nodes + 64:
            self._heap = [entry for entry in self._heap if _is_spare(entry[2], entry[1])]
            heapq.heapify(self._heap)
        node.entry = next(self._numbers)
        heapq.heappush(self._heap, (node.stamp + _HELD * (node.held > 0), node.entry, node))

    def _lose_end(self, node: Node) -> None:
        """The last page of a node leaves the tree."""

    def _drop(self, node: Node) -> None:
        self._lose_end(node)
        node.stamp, node.entry = -1, 0
        if node.parent is not None:
            self.num_nodes -= 1
            self.num_pages -= len(node.pages)

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants that can be checked in O(1)."""
        assert 0 <= self.evictable <= self.num_pages, f"{self.evictable} of {self.num_pages} evictable"
        assert self.num_locks >= 0
        self.holds.check(self.num_pages)
        if not self.num_locks:
            assert self.evictable == self.num_pages, "pages are held without a lock"

    def audit(self, locks: Iterable[Lock]) -> list[int]:
        """Assert by walking that the tree is consistent and that ``locks`` are all its locks; returns the
        pages that it owns. O(nodes)."""
        held: dict[int, int] = {}
        detached: dict[int, Node] = {}
        count = 0
        for lock in locks:
            count += 1
            for node in upwards(lock.node):
                held[id(node)] = held.get(id(node), 0) + 1
                if node.detached:
                    detached[id(node)] = node
        nodes = [*self._nodes(), *detached.values()]
        self._audit_nodes(nodes)
        self.holds.audit(nodes)
        for node in nodes:
            assert node.locks == held.get(id(node), 0), f"{node.locks} locks counted, {held} held"
            assert len(node.key) == len(node.pages) * self._page_bytes
            for edge, child in node.children.items():
                assert child.parent is node, "a child has two parents"
                assert child.key.startswith(edge), "a child is at the wrong edge"
        inner = [node for node in nodes if node.parent is not None]
        pages = [page for node in inner for page in node.pages]
        assert count == self.num_locks
        assert len(inner) == self.num_nodes
        assert len(pages) == self.num_pages
        assert self.evictable == sum(len(node.pages) for node in inner if not node.locks)
        entries = [(order, node) for order, number, node in self._heap if _is_spare(node, number)]
        assert all((order >= _HELD) == (node.held > 0) for order, node in entries), "its order is another"
        offered = {id(node) for _, node in entries}
        spare = {id(node) for node in inner if not (node.locks or node.children or node.detached)}
        assert offered == spare, "a leaf can never be evicted"
        return pages

    def _audit_nodes(self, nodes: Sequence[Node]) -> None:
        """Assert what else must hold of all nodes, the detached ones included."""

    def _nodes(self) -> Iterator[Node]:
        """All nodes, roots included, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _is_spare(node: Node, number: int) -> bool:
    """Whether an entry of the heap is the newest of a leaf, which can be evicted."""
    return node.entry == number and not (node.locks or node.children)
