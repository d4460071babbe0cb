"""RadixTree: the KV pages of finished prefixes, found again by their tokens.

A node holds a run of pages and the tokens on them; the path from a root spells a prefix. Two prefixes
share the nodes of their common pages and part at a page boundary::

    root ─── [system prompt: 4 pages] ──┬── [question A: 2 pages] ─── [answer A: 3 pages]
               locks 2                  │     locks 1                   locks 1
                                        └── [question B: 1 page]
                                              locks 1

Who reads a prefix holds a :class:`Lock` on its deepest node, which counts on every node up to the root;
pages of a node without locks may be evicted, leaves first, least recently used first. The idea is that
of RadixAttention (SGLang, arXiv 2312.07104); keys here are bytes, so that a whole run is compared at once.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Lock", "Node", "RadixTree", "token_key"]

_TOKEN_BYTES = 4


def token_key(ids: Iterable[int]) -> bytes:
    """Token ids as a key: four bytes each. Raises OverflowError for what is not a 31-bit id."""
    return array("i", ids).tobytes()


class Node:
    """A run of pages below its parent. Roots hold none. Read-only to everybody but the tree."""

    __slots__ = ("children", "detached", "fence", "key", "locks", "namespace", "pages", "parent", "stamp")

    def __init__(self, parent: Node | None, key: bytes, pages: list[int], namespace: str) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.namespace = namespace
        #: by the key of their first page
        self.children: dict[bytes, Node] = {}
        #: locks on this node and on all below it
        self.locks = 0
        #: logical time of the last use
        self.stamp = 0
        #: the newest launched step that may read these pages, as far as unlocking told
        self.fence = 0
        #: no longer found by its tokens; its pages leave with the last lock
        self.detached = False


class Lock:
    """One reader's hold on a prefix. Given back exactly once, by :meth:`RadixTree.unlock`."""

    __slots__ = ("_node", "num_pages")

    def __init__(self, node: Node, num_pages: int) -> None:
        self._node: Node | None = node
        #: length of the locked prefix in pages
        self.num_pages = num_pages

    @property
    def node(self) -> Node:
        """The deepest node of the prefix. Raises RuntimeError once the lock was given back."""
        if self._node is None:
            raise RuntimeError("this lock was given back already")
        return self._node

    def pages(self) -> list[int]:
        """The pages of the locked prefix, from position 0 on."""
        runs = [node.pages for node in _upwards(self.node)]
        return [page for run in reversed(runs) for page in run]


class RadixTree:
    """Prefixes of whole pages by namespace and tokens. Keys come from :func:`token_key`.

    Matching costs O(pages matched), locking O(depth), eviction O(log nodes) per node; nothing here ever
    walks the whole tree but :meth:`flush` and :meth:`audit`.
    """

    __slots__ = (
        "_clock",
        "_heap",
        "_numbers",
        "_page_bytes",
        "_roots",
        "evictable",
        "num_locks",
        "num_nodes",
        "num_pages",
        "version",
    )

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        #: (stamp, number, node) of leaves that had no lock when they were put here; stale ones are skipped
        self._heap: list[tuple[int, int, Node]] = []
        self._numbers = itertools.count()
        self._clock = 0
        #: locks that were not given back
        self.num_locks = 0
        self.num_nodes = 0
        #: pages the tree owns
        self.num_pages = 0
        #: pages of nodes without locks
        self.evictable = 0
        #: changes whenever a match may come out differently, in its length or in its node
        self.version = 0

    # -- reading --------------------------------------------------------------------------------

    def match(self, key: bytes, namespace: str = "") -> int:
        """How many pages of ``key`` are here. A look that leaves no trace."""
        root = self._roots.get(namespace)
        return 0 if root is None else self._walk(root, key)[2] // self._page_bytes

    def find(self, key: bytes, namespace: str = "") -> tuple[int, Node | None]:
        """How many pages of ``key`` are here, and the node in which the match ends, perhaps half-way.

        The node is the root where nothing matches, and None where the namespace is empty.
        """
        root = self._roots.get(namespace)
        if root is None:
            return 0, None
        node, _, matched = self._walk(root, key)
        return matched // self._page_bytes, node

    def lock(self, key: bytes, namespace: str = "") -> Lock:
        """Hold the longest prefix of ``key`` that is here, which may be none of it."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", [], namespace)
            self.version += 1
        node, common, matched = self._walk(root, key)
        if common < len(node.key):
            node = self._split(node, common)
        self._hold(node, None)
        self.num_locks += 1
        return Lock(node, matched // self._page_bytes)

    def _walk(self, node: Node, key: bytes) -> tuple[Node, int, int]:
        """The deepest node below ``node`` that matches, and how many bytes of its own key and of ``key``."""
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
        """Bytes of whole pages that ``run`` and ``key[at:]`` share. The first page is known to be shared."""
        low, high = 1, len(run) // self._page_bytes - 1
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(run[: middle * self._page_bytes], at):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after ``at`` bytes of its key; returns the new upper half. Both keep its locks."""
        parent, pages = node.parent, at // self._page_bytes
        assert parent is not None
        upper = Node(parent, node.key[:at], node.pages[:pages], node.namespace)
        upper.locks, upper.stamp, upper.fence = node.locks, node.stamp, node.fence
        parent.children[self._edge(upper)] = upper
        node.parent, node.key, node.pages = upper, node.key[at:], node.pages[pages:]
        upper.children[self._edge(node)] = node
        self.num_nodes += 1
        self.version += 1
        return upper

    def _hold(self, node: Node, top: Node | None) -> None:
        """Count a lock on ``node`` and what is above it, up to and without ``top``."""
        self._clock += 1
        for each in _upwards(node):
            if each is top:
                return
            if not each.locks:
                self.evictable -= len(each.pages)
            each.locks += 1
            each.stamp = self._clock

    # -- writing --------------------------------------------------------------------------------

    def extend(self, lock: Lock, key: bytes, pages: Sequence[int]) -> list[int]:
        """Add the ``pages`` that follow a locked prefix, and hold them with the same lock.

        ``key`` spells the tokens on them, whole pages only. Returns the pages that are now in the tree
        for these tokens: the caller's own, or others where somebody was there first; the caller keeps
        what was not taken. All of ``pages``, and nothing done, if the prefix was flushed meanwhile.
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
        self._hold(node, start)
        lock._node = node
        lock.num_pages += len(pages)
        runs = []
        for each in _upwards(node):
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

    # -- giving back ----------------------------------------------------------------------------

    def unlock(self, lock: Lock, fence: int) -> list[tuple[list[int], int]]:
        """Give a lock back. ``fence`` is the newest launched step in which its holder read the pages.

        Returns runs of pages, with their fences, that left the tree with this lock because they had been
        flushed or forgotten. Raises RuntimeError for a lock that was given back already.
        """
        node = lock.node
        lock._node = None
        self.num_locks -= 1
        self._clock += 1
        gone = []
        for each in _upwards(node):
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

    def forget(self, lock: Lock) -> None:
        """Let nobody else find those pages that only this lock's holder has ever continued to use: the
        end of its prefix that no other lock holds and nothing else hangs from."""
        for node in _upwards(lock.node):
            if node.parent is None or node.detached or node.locks > 1 or node.children:
                return
            node.detached = True
            del node.parent.children[self._edge(node)]
            self.version += 1

    def evict(self, count: int, resolved: int) -> list[int]:
        """Let go of up to ``count`` pages, least recently used first, and return them.

        It stops before a page that a launched step newer than ``resolved`` may still read; such a page
        is unused for long enough a step or two later. Runs are cut from their end.
        """
        taken: list[int] = []
        while len(taken) < count and self._heap:
            stamp, _, node = self._heap[0]
            if not _is_spare(node, stamp):
                heapq.heappop(self._heap)
                continue
            if node.fence > resolved:
                break
            keep = max(0, len(node.pages) - (count - len(taken)))
            taken += reversed(node.pages[keep:])
            self.evictable -= len(node.pages) - keep
            self.version += 1
            if keep:
                self.num_pages -= len(node.pages) - keep
                node.key, node.pages = node.key[: keep * self._page_bytes], node.pages[:keep]
                continue
            heapq.heappop(self._heap)
            parent = node.parent
            assert parent is not None
            del parent.children[self._edge(node)]
            self._drop(node)
            self._offer(parent)
        return taken

    def flush(self) -> list[tuple[list[int], int]]:
        """Forget everything: nothing cached so far is ever matched again. O(nodes).

        Returns the runs of pages, with their fences, that are the caller's now; pages that are locked
        follow when they are unlocked.
        """
        gone = []
        for node in list(self._nodes()):
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
        """A node lost its last lock or child: it may be evicted now, or, a root, has no purpose."""
        if node.children or node.locks:
            return
        if node.parent is None:
            if self._roots.get(node.namespace) is node:
                del self._roots[node.namespace]
                self.version += 1
            return
        if len(self._heap) > 2 * self.num_nodes + 64:
            self._heap = [entry for entry in self._heap if _is_spare(entry[2], entry[0])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (node.stamp, next(self._numbers), node))

    def _drop(self, node: Node) -> None:
        node.stamp = -1
        if node.parent is not None:
            self.num_nodes -= 1
            self.num_pages -= len(node.pages)

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what can be seen in O(1)."""
        assert 0 <= self.evictable <= self.num_pages, f"{self.evictable} of {self.num_pages} evictable"
        assert self.num_locks >= 0
        if not self.num_locks:
            assert self.evictable == self.num_pages, "pages are held and nobody has a lock"

    def audit(self, locks: Iterable[Lock]) -> list[int]:
        """Assert by walking that the tree is sound and held by ``locks`` and nobody else; returns the
        pages it owns. O(nodes)."""
        held: dict[int, int] = {}
        detached: dict[int, Node] = {}
        count = 0
        for lock in locks:
            count += 1
            for node in _upwards(lock.node):
                held[id(node)] = held.get(id(node), 0) + 1
                if node.detached:
                    detached[id(node)] = node
        nodes = [*self._nodes(), *detached.values()]
        for node in nodes:
            assert node.locks == held.get(id(node), 0), f"{node.locks} locks counted, {held} held"
            assert len(node.key) == len(node.pages) * self._page_bytes
            for edge, child in node.children.items():
                assert child.parent is node, "a child hangs from two nodes"
                assert child.key.startswith(edge), "a child hangs from the wrong edge"
        inner = [node for node in nodes if node.parent is not None]
        pages = [page for node in inner for page in node.pages]
        assert count == self.num_locks
        assert len(inner) == self.num_nodes
        assert len(pages) == self.num_pages
        assert self.evictable == sum(len(node.pages) for node in inner if not node.locks)
        offered = {id(node) for stamp, _, node in self._heap if _is_spare(node, stamp)}
        spare = {id(node) for node in inner if not (node.locks or node.children or node.detached)}
        assert offered == spare, "a leaf can never be evicted"
        return pages

    def _nodes(self) -> Iterator[Node]:
        """Roots and everything below, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _upwards(node: Node | None) -> Iterator[Node]:
    """The node and what is above it, the root included."""
    while node is not None:
        yield node
        node = node.parent


def _is_spare(node: Node, stamp: int) -> bool:
    """The entry of an evictable leaf, not outdated by a later use."""
    return node.stamp == stamp and not (node.locks or node.children)
