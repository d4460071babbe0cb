"""FencedPool: allocates small integers, never one that a launched step could still access.

The states of an item and their transitions::

             take()                      give(fence)
    free ──────────────► private ───────────────────────► fenced
      ▲                    │ fence already resolved          │
      └────────────────────┴──────────────◄──────────────────┘
                                        resolved(fence)

``free + fenced + private == total`` at every moment; :meth:`FencedPool.check` asserts it in O(1) and
:meth:`FencedPool.audit` by walking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["CachedPool", "FencedPool"]


class FencedPool:
    """Items ``1 .. total``; 0 is the null item, which padding uses and which is never allocated.

    A *fence* is the id of the newest launched step that could access an item when it was given back. The
    item becomes free when that step has resolved. (Freeing it on the next result instead is a common bug:
    with two steps in flight the second one still reads the item.)
    """

    __slots__ = ("_fenced", "_free", "_num_fenced", "_num_private", "_resolved", "total")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one item, got {total}")
        self.total = total
        # Taken from the end, so that low numbers are used first and a lightly used pool stays compact.
        self._free = list(range(total, 0, -1))
        self._fenced: dict[int, list[int]] = {}
        self._num_fenced = 0
        self._num_private = 0
        self._resolved = 0

    @property
    def free(self) -> int:
        """Number of items that :meth:`take` can return now."""
        return len(self._free)

    @property
    def fenced(self) -> int:
        """Number of items that were given back and become free as steps resolve."""
        return self._num_fenced

    @property
    def last_resolved(self) -> int:
        """Id of the newest step that has resolved."""
        return self._resolved

    @property
    def private(self) -> int:
        """Number of items that have an owner."""
        return self._num_private

    def take(self, count: int = 1) -> list[int]:
        """Allocate ``count`` free items. Raises IndexError, and allocates none, if there are fewer."""
        if count > len(self._free):
            raise IndexError(f"{count} items wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        self._num_private += count
        return taken

    def give(self, items: Iterable[int], fence: int) -> None:
        """Return items to the pool; they are free at once if step ``fence`` has resolved already."""
        items = list(items)
        self._num_private -= len(items)
        if fence <= self._resolved:
            self._free.extend(reversed(items))
            return
        self._fenced.setdefault(fence, []).extend(items)
        self._num_fenced += len(items)

    def resolved(self, step_id: int) -> None:
        """Step ``step_id`` has resolved; steps resolve in the order of their ids, each exactly once."""
        self._resolved = step_id
        items = self._fenced.pop(step_id, None)
        if items is not None:
            self._num_fenced -= len(items)
            self._free.extend(reversed(items))

    def check(self) -> None:
        """Assert conservation, in O(1)."""
        counted = len(self._free) + self._num_fenced + self._num_private
        assert counted == self.total, f"{counted} items counted, {self.total} exist"
        assert self._num_private >= 0, "more items were given back than taken"

    def audit(self, owned: Iterable[int]) -> None:
        """Assert by walking that ``owned``, fenced and free items are disjoint and complete. O(total)."""
        fenced = [item for items in self._fenced.values() for item in items]
        owned = list(owned)
        everything = sorted([*self._free, *fenced, *owned])
        assert everything == list(range(1, self.total + 1)), "an item is lost, doubled or owned twice"
        assert len(fenced) == self._num_fenced
        assert len(owned) == self._num_private


class CachedPool(FencedPool):
    """A pool of which the prefix cache owns some items.

    They are in one state besides those of other pools: ``cached``, for items whose content is complete and
    resolved. :meth:`keep` makes private items cached, :meth:`drop` returns cached ones to the pool.
    """

    __slots__ = ("cached",)

    def __init__(self, total: int) -> None:
        super().__init__(total)
        #: items that the prefix cache owns
        self.cached = 0

    def keep(self, count: int) -> None:
        """Transfer ``count`` private items to the prefix cache."""
        self._num_private -= count
        self.cached += count

    def drop(self, items: Sequence[int], fence: int) -> None:
        """Return items of the prefix cache to the pool; they are free once step ``fence`` has resolved."""
        self.cached -= len(items)
        self._num_private += len(items)
        self.give(items, fence)

    def check(self) -> None:
        counted = self.free + self.fenced + self.private + self.cached
        assert counted == self.total, f"{counted} items counted, {self.total} exist"
        assert self.private >= 0, "more items were given back than taken"
        assert self.cached >= 0, "more items left the cache than it had"

    def audit(self, owned: Iterable[int], cached: Iterable[int] = ()) -> None:
        """As :meth:`FencedPool.audit`; ``cached`` are the items of the prefix cache."""
        cached = list(cached)
        assert len(cached) == self.cached, f"{len(cached)} items in the cache, {self.cached} counted"
        self._num_private += len(cached)
        try:
            super().audit([*owned, *cached])
        finally:
            self._num_private -= len(cached)
