"""MemoryStore: pages in the memory of this process."""

from __future__ import annotations

from aioinfer.ledger import ByteCache
from aioinfer.tiers.store import BaseStore, Views, size_of

__all__ = ["MemoryStore"]


class MemoryStore(BaseStore):
    """Pages that engines of one process share; what was not used for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: of all pages and states."""
        super().__init__("the page store in memory")
        self._max_bytes = max_bytes
        self._kept: ByteCache[bytes, bytes] = ByteCache("page store", max_bytes)
        self._puts = 0

    def _has(self, key: bytes) -> bool:
        return key in self._kept

    def _read(self, key: bytes, views: Views) -> str:
        found = self._kept.get(key)
        if found is None:
            return "absent"
        if len(found) != size_of(views):
            return "size"
        start, whole = 0, memoryview(found)
        for view in views:
            view[:] = whole[start : start + len(view)]
            start += len(view)
        return ""

    def _put(self, key: bytes, views: Views) -> str:
        size = size_of(views)
        if size > self._max_bytes:
            return "too large"
        if self._kept.get(key) is None:
            self._kept.put(key, b"".join(views), size)
            self._wrote(key, size)
            with self._lock:
                self._puts += 1
                self._evicted = self._puts - len(self._kept)
        return ""

    def _forget(self, key: bytes) -> None:
        if self._kept.get(key) is not None:
            self._kept.forget(key)
            with self._lock:
                self._puts -= 1

    def _held(self) -> tuple[int, int]:
        return len(self._kept), self._kept.bytes

    def close(self) -> None:
        super().close()
        self._kept.clear()
