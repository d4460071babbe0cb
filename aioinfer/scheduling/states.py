"""StateCells: which cell of recurrent state each row reads and writes.

Cells are numbered as in :mod:`aioinfer.model.state`: 0 is the empty state, then those of the slots, then the
snapshots. A row reads one and writes one, so nothing is ever copied::

    prompt     |---- chunk ----|---- chunk ----|---- chunk ----|-- last --| decode, decode ...
    reads      0               slot            snapshot        slot         slot
    writes          slot            snapshot        slot           slot     slot

Chunks end on purpose where others, or the request itself, may continue: at the last page boundary of what is
prefilled, and where the request parts from what is cached or from a request that waits for it. A snapshot is
taken there. (Marconi, arXiv 2411.19379, takes them at these two kinds of positions, too.) It is private until
its chunk has resolved; then the prefix tree carries it.

A state cannot be taken back: where KV alone would be rewound to any position, a request continues from its
deepest snapshot before that position, or from the beginning.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from aioinfer.cache.nodes import Snapshot
from aioinfer.cache.snapshots import SnapshotPool, SnapshotTree
from aioinfer.scheduling.allocation import StateSnapshots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioinfer.scheduling.arrivals import Departure
    from aioinfer.scheduling.sequence import Sequence

__all__ = ["StateCells"]

#: requests waiting for another one's prefix that are heard on where it ends
_MOST_PARTINGS = 4


class StateCells:
    """The cells of a model with recurrent state. A part of :class:`~aioinfer.scheduling.memory.Memory`, which
    holds the pages of the same positions."""

    __slots__ = ("_least", "_page_size", "_slots", "hits", "pool", "tree")

    def __init__(self, num_slots: int, page_size: int, tree: SnapshotTree | None, least: int = 1) -> None:
        """``tree``: None if no snapshots are taken. ``least``: tokens that a snapshot must save, for it costs
        a further prefill step."""
        self._slots = num_slots
        self._page_size = page_size
        self._least = max(1, least)
        self.tree = tree
        self.pool: SnapshotPool | None = None if tree is None else tree.pool
        #: times a request started from a snapshot, at its admission or when it was rewound
        self.hits = 0

    # -- the life of a request ------------------------------------------------------------------

    def admitted(self, sequence: Sequence, matched: int) -> None:
        """Start a request after the end of its lock; ``matched`` pages of its tokens are cached, those
        without a state after them included."""
        kv = sequence.kv
        kv.states = StateSnapshots()
        if kv.lock is None:
            return
        self._start_from(sequence, kv.lock.node.snapshot)
        size = self._page_size
        if kv.cacheable:
            self._want(sequence, kv.cached_pages * size, matched * size, *kv.partings.values())

    def arrived(self, sequence: Sequence) -> None:
        """The state that an admitted request starts from has arrived in its slot's cell."""
        self._leave_source(sequence)

    def part(self, leader: Sequence, sequence: Sequence) -> None:
        """``request`` waits until ``leader`` has computed what both begin with: let a snapshot be taken where
        that ends. The first few that wait are heard, once each."""
        kv, size = leader.kv, self._page_size
        if self.tree is None or sequence.key in kv.partings or len(kv.partings) == _MOST_PARTINGS:
            return
        most = min(leader.cursor.reusable, sequence.cursor.reusable) // size
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            stop = middle * size
            if leader.token_key(low * size, stop) == sequence.token_key(low * size, stop):
                low = middle
            else:
                high = middle - 1
        kv.partings = {**kv.partings, sequence.key: low * size}
        if kv.states is not None:
            kv.states.wanted.add(low * size)

    def stop(self, sequence: Sequence, start: int, stop: int) -> int | None:
        """The position before ``stop`` at which a chunk from ``start`` on should end for a snapshot to be
        taken there; None if nowhere, or if there is no cell for one."""
        states = sequence.kv.states
        assert states is not None
        if not states.wanted:
            return None
        ahead = [position for position in states.wanted if start < position < stop]
        if not ahead or self.tree is None or not self.tree.make_room():
            return None
        return min(ahead)

    def cells(
        self, sequence: Sequence, start: int, stop: int, step_id: int, *, last: bool
    ) -> tuple[int, int]:
        """The cells that the row of positions [start, stop) reads and writes. ``last``: it samples, and
        decodes follow, which know the slot's cell alone."""
        kv = sequence.kv
        states = kv.states
        assert states is not None
        read = write = kv.slot
        source = states.source
        if source is not None:
            assert source.position == start, "the request continues elsewhere than its state"
            read = self._slots + source.item
            source.fence = step_id
            self._leave_source(sequence)
        elif not start:
            read = 0
        if not last and stop in states.wanted and self.tree is not None and self.tree.make_room():
            snapshot = Snapshot(self.tree.pool.take(1)[0], stop)
            snapshot.fence, snapshot.readers = step_id, 1
            states.source = snapshot
            states.taken.append(snapshot)
            write = self._slots + snapshot.item
        return read, write

    def settle(self, sequence: Sequence) -> None:
        """Offer a request's snapshots to others, after its pages."""
        states = sequence.kv.states
        if states is None or not states.taken:
            return
        assert self.tree is not None
        lock, committed = sequence.kv.lock, sequence.cursor.committed
        while states.taken and states.taken[0].position <= committed:
            # Out of the list last: what raises before leaves it to be released with the request.
            snapshot = states.taken[0]
            shared = lock is not None and sequence.kv.cacheable and self.tree.attach(snapshot, lock)
            if not shared and snapshot is not states.source:
                self.tree.pool.give((snapshot.item,), snapshot.fence)
            del states.taken[0]

    def release(self, sequence: Sequence) -> None:
        """The request gives up what is its own. Its lock must still be held."""
        if sequence.kv.states is not None:
            self._let_go(sequence)
            sequence.kv.states = None
        sequence.kv.partings = {}

    def rewind(self, sequence: Sequence, computed: int) -> int:
        """Let a running request continue from a state after at most ``computed`` positions; returns after
        how many. What is in flight for it is void."""
        self._let_go(sequence)
        sequence.kv.states = StateSnapshots()
        lock = sequence.kv.lock
        if lock is None or self.tree is None:
            return 0
        size = self._page_size
        pages, node = self.tree.deepest(lock, computed // size)
        self._start_from(sequence, node.snapshot)
        if sequence.kv.cacheable:
            self._want(sequence, pages * size)
        return pages * size

    # -- inside ---------------------------------------------------------------------------------

    def _start_from(self, sequence: Sequence, snapshot: Snapshot | None) -> None:
        states = sequence.kv.states
        assert states is not None
        states.source = snapshot
        if snapshot is not None:
            assert self.tree is not None
            snapshot.readers += 1
            self.tree.pool.used(snapshot)
            self.hits += 1

    def _want(self, sequence: Sequence, start: int, *positions: int) -> None:
        """Snapshots at these positions and at the last page boundary with a token after it, as far as each
        saves enough after ``start`` and the one before it."""
        states = sequence.kv.states
        assert states is not None
        last = (sequence.known - 1) // self._page_size * self._page_size
        before = start
        for position in sorted({*positions, last}):
            if before + self._least <= position <= last:
                states.wanted.add(position)
                before = position

    def _leave_source(self, sequence: Sequence) -> None:
        states = sequence.kv.states
        assert states is not None
        source = states.source
        if source is None:
            return
        states.source = None
        source.readers -= 1
        if source.node is None and source not in states.taken:
            # It could not be shared when its chunk resolved.
            assert self.tree is not None
            self.tree.pool.give((source.item,), min(source.fence, sequence.kv.last_step))

    def _let_go(self, sequence: Sequence) -> None:
        states = sequence.kv.states
        assert states is not None
        self._leave_source(sequence)
        for snapshot in states.taken:
            assert self.tree is not None
            # A chunk whose planning was abandoned is in no step.
            self.tree.pool.give((snapshot.item,), min(snapshot.fence, sequence.kv.last_step))
        states.taken.clear()

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert conservation of snapshots, in O(1)."""
        if self.pool is not None:
            self.pool.check()

    def audit(self, running: Iterable[Sequence], departures: Iterable[Departure] = ()) -> None:
        """Assert by walking that every snapshot is where it should be; the tree was audited already."""
        readers = Counter(each.snapshot for each in departures if each.snapshot is not None)
        private: list[int] = []
        for sequence in running:
            states = sequence.kv.states
            assert states is not None, sequence
            private += [snapshot.item for snapshot in states.private()]
            if states.source is not None:
                readers[states.source] += 1
                assert states.source.position == sequence.cursor.computed, sequence
            for snapshot in states.taken:
                assert snapshot.node is None, "a snapshot is private and shared"
        if self.pool is None:
            return
        assert all(snapshot.readers == count for snapshot, count in readers.items()), "readers were lost"
        cached = self.pool.cached_snapshots()
        assert all(not snapshot.readers or snapshot in readers for snapshot in cached), "a reader is gone"
        self.pool.audit(private, [snapshot.item for snapshot in cached])
