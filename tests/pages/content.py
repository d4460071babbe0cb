"""Pages whose bytes follow from their names, so that everybody can judge what a store has read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from hashlib import blake2b, shake_128

from aioinfer.tiers.store import PageStore, Views

__all__ = ["PAGE", "STATE", "data_of", "empty", "name_of", "page_of", "pieces", "read_right", "state_of"]

#: bytes
PAGE, STATE = 3000, 700


def name_of(number: int) -> bytes:
    return blake2b(b"page %d" % number, digest_size=16).digest()


def data_of(name: bytes, size: int) -> bytes:
    """What a page or a state of this name has."""
    return shake_128(b"%d of " % size + name).digest(size)


def pieces(data: bytes, cuts: Sequence[int] = (1, 1000, 1001)) -> list[memoryview]:
    """Data in pieces that can be written to."""
    ends = [0, *(cut for cut in cuts if cut < len(data)), len(data)]
    return [memoryview(bytearray(data[start:end])) for start, end in itertools.pairwise(ends)]


def page_of(name: bytes) -> list[memoryview]:
    return pieces(data_of(name, PAGE))


def state_of(name: bytes) -> list[memoryview]:
    return pieces(data_of(name, STATE))


def empty(size: int = PAGE, seed: int = 0) -> list[memoryview]:
    """Room for data, in pieces that are others than those that it was written from."""
    cuts = sorted(random.Random(seed).sample(range(1, size), 5))
    return pieces(b"\xee" * size, cuts)


def read_right(store: PageStore, names: Sequence[bytes], *, states: bool = False) -> int:
    """How many of the first pages a store has read; asserts that their bytes are right."""
    pages: list[Views] = [empty(seed=at) for at in range(len(names))]
    wanted: list[Views | None] = [empty(STATE, at) if states else None for at in range(len(names))]
    count = store.read(names, pages, wanted)
    for name, page, state in zip(names[:count], pages, wanted, strict=False):
        assert b"".join(page) == data_of(name, PAGE), "a page has wrong bytes"
        assert state is None or b"".join(state) == data_of(name, STATE), "a state has wrong bytes"
    return count
