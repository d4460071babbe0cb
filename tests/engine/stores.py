"""FlakyStore: a page store as a disk could be, at random: it forgets, refuses and misses."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from aioinfer.tiers.store import PageStore, StoreCounts, Views

__all__ = ["FlakyStore"]


class FlakyStore(PageStore):
    """Keeps few pages, those used last, and has ``rate`` of its calls go wrong in every way that a store
    may."""

    def __init__(self, rng: random.Random, most: int, rate: float) -> None:
        self._rng = rng
        self._most = most
        self._rate = rate
        self._kept: OrderedDict[bytes, tuple[bytes, bytes | None]] = OrderedDict()

    def _wrong(self) -> bool:
        return self._rng.random() < self._rate

    def has(self, name: bytes) -> bool:
        return name in self._kept

    def has_state(self, name: bytes) -> bool:
        return self._kept.get(name, (b"", None))[1] is not None

    def leading(self, names: Sequence[bytes], *, states: bool = False) -> int:
        count = 0
        for at, name in enumerate(names, 1):
            if name not in self._kept:
                break
            if not states or self.has_state(name):
                count = at
        return count

    def put(self, name: bytes, page: Views, state: Views | None = None) -> bool:
        if self._wrong():
            return False
        self._kept[name] = b"".join(page), None if state is None else b"".join(state)
        self._kept.move_to_end(name)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return True

    def read(
        self, names: Sequence[bytes], pages: Sequence[Views], states: Sequence[Views | None] = ()
    ) -> int:
        right, most = 0, self._rng.randrange(len(names)) if self._wrong() else len(names)
        for at, name in enumerate(names):
            page, state = self._kept.get(name, (b"", None))
            wanted = states[at] if states else None
            if at < most and right == at and page and (wanted is None or state is not None):
                _copy(page, pages[at])
                if wanted is not None:
                    assert state is not None
                    _copy(state, wanted)
                right += 1
            else:
                for view in (*pages[at], *(wanted or ())):
                    view[:] = bytes(len(view))  # what follows is junk
        return right

    def forget(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._kept.pop(name, None)

    def refresh(self, names: Sequence[bytes] | None = None, *, states: bool = False) -> None:
        """Nobody else writes there."""

    def counts(self) -> StoreCounts:
        return StoreCounts(len(self._kept), 0, 0, 0, 0, 0, 0, {}, {})

    def close(self) -> None:
        self._kept.clear()


def _copy(data: bytes, views: Views) -> None:
    for view in views:
        view[:], data = data[: len(view)], data[len(view) :]
    assert not data
