"""Memory: which pages and which slot a request holds, from admission to release.

::

      admit: lock the cached prefix, take the rest        release: offer what is committed,
             ┌── cached ──┬──── private ────┐                      unlock, give the rest back
    request  │ p7  p2  p9 │ p4   p11   p3   │
             └─────┬──────┴────┬────────────┘
                   │           │ commit: pages whose KV is resolved join the tree
              RadixTree ◄──────┘
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from aioinfer.cache.nodes import Hold, Node
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.radix import Lock, RadixTree
from aioinfer.cache.slots import SlotPool
from aioinfer.cache.snapshots import SnapshotPool, SnapshotTree
from aioinfer.scheduling.arrivals import Arrival, Departure, Transfers
from aioinfer.scheduling.features import FeatureCache
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.states import StateCells

__all__ = ["Memory", "PageFinder"]


class PageFinder(Protocol):
    """What the scheduler asks for pages that are computed already, though not in this memory."""

    def find(self, sequence: Sequence) -> Arrival | None:
        """Begin to fill the pages of an admitted request that follow its cached ones; None if nothing has
        them, or computing them is faster. :meth:`RequestQueues.landed` ends it."""

    def committed(self, sequence: Sequence, start: int, stop: int) -> None:
        """The pages [start, stop) of a running request are in the cache now, at the end of its lock."""

    def distrusted(self, sequence: Sequence, start: int, stop: int) -> None:
        """The KV of these pages of a request is not to be found any more."""


class Memory:
    """Pages, slots and, unless ``prefix_cache`` is off, the tree of prefixes."""

    __slots__ = (
        *("copy_page", "features", "finder", "hit_tokens", "pages", "queried_tokens", "slots", "states"),
        *("transfers", "tree"),
    )

    def __init__(
        self,
        pages: PageAllocator,
        slots: SlotPool,
        *,
        prefix_cache: bool = True,
        snapshots: int | None = None,
        snapshot_tokens: int = 1,
    ) -> None:
        """``snapshots``: of a model with recurrent state, how many can be kept; without any, no prefix is
        ever used again. None: the model has no such state. ``snapshot_tokens``: that each must save."""
        self.pages = pages
        self.slots = slots
        self.tree: RadixTree | None = None
        #: of a model with recurrent state
        self.states: StateCells | None = None
        if snapshots is None:
            self.tree = RadixTree(pages.page_size) if prefix_cache else None
        else:
            tree = None
            if prefix_cache and snapshots:
                tree = SnapshotTree(pages.page_size, SnapshotPool(snapshots))
            self.tree = tree
            self.states = StateCells(slots.total, pages.page_size, tree, snapshot_tokens)
        #: of a model that reads images
        self.features: FeatureCache | None = None
        #: copies one page to another at once; None: the device cannot, or no sequence begins amid a page
        self.copy_page: Callable[[int, int], None] | None = None
        #: finds pages elsewhere; None: nothing is looked for
        self.finder: PageFinder | None = None
        self.transfers = Transfers()
        #: tokens of admitted requests, and how many of them were in the cache
        self.queried_tokens = 0
        self.hit_tokens = 0

    # -- looking --------------------------------------------------------------------------------

    @property
    def evictable(self) -> int:
        """Cached pages that no request reads."""
        return 0 if self.tree is None else self.tree.evictable

    @property
    def available(self) -> int:
        """Pages that can be had, now or when the steps in flight have resolved and workers are done."""
        return self.pages.free + self.pages.fenced + self.evictable + self.transfers.pages

    @property
    def returning(self) -> bool:
        """Pages come back by themselves when steps in flight resolve, or workers are done."""
        working = self.transfers and not self.transfers.hung
        return bool(self.pages.fenced or self.evictable or working)

    @property
    def snapshots_cached(self) -> int:
        """Recurrent states that are kept for cached prefixes."""
        return 0 if self.states is None or self.states.pool is None else self.states.pool.cached

    @property
    def snapshot_hits(self) -> int:
        """Times a request started from one of them."""
        return 0 if self.states is None else self.states.hits

    @property
    def encoded_images(self) -> int:
        """Images, and tiles of images, that were encoded."""
        return 0 if self.features is None else self.features.encoded

    def lookup(self, sequence: Sequence) -> tuple[int, Node | None]:
        """Pages of a waiting request that are cached, and the node where they end; remembered.

        The last known token is never among them: one position is always left to compute.
        """
        if self.tree is None:
            return 0, None
        reusable = sequence.cursor.reusable
        version, length, pages, node = sequence.kv.hit
        if version != self.tree.version or length != reusable:
            pages, node = self.tree.find(self._key(sequence), sequence.namespace)
            sequence.kv.hit = (self.tree.version, reusable, pages, node)
        return pages, node  # type: ignore[return-value]

    def shared(self, sequence: Sequence) -> tuple[int, Node | None]:
        """The same of any request: of a running one, the pages it has in common with the cache from which
        others could start."""
        if sequence.kv.lock is None:
            return self.lookup(sequence)
        if self.states is None or self.states.tree is None:
            return sequence.kv.cached_pages, sequence.kv.lock.node
        return self.states.tree.deepest(sequence.kv.lock)

    def uncached(self, sequence: Sequence) -> int:
        """Tokens of a waiting request that admission would have to compute."""
        return sequence.length - self.lookup(sequence)[0] * self.pages.page_size

    def cached_tokens(self, key: bytes, namespace: Hashable) -> int:
        """The number of the tokens with this key that are cached, from the first on."""
        if self.tree is None:
            return 0
        return self.tree.match(key, namespace) * self.pages.page_size

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        """Whether a waiting request finds its pages with ``reserve`` more to spare. Never too pessimistic."""
        need = self.pages.pages_for(sequence.length) - self.lookup(sequence)[0]
        return need + reserve <= self.available

    # -- the life of a request ------------------------------------------------------------------

    def admit(self, sequence: Sequence, reserve: int) -> bool:
        """Give a request a slot and pages for all its known tokens; all or nothing.

        Everything known gets its pages at once: a prefill that started never stalls half-way.
        """
        if not self.slots.free or not self.fits(sequence, reserve):
            return False
        lock = None if self.tree is None else self.tree.lock(self._key(sequence), sequence.namespace)
        hit = 0 if lock is None else lock.num_pages
        need = self.pages.pages_for(sequence.length) - hit
        # Locking made the hit pages unavailable to others: count again.
        fresh = self._take(need) if need + reserve <= self.available else None
        if fresh is None:
            self._unlock(lock, 0)
            return False
        (sequence.kv.slot,) = self.slots.take(1)
        sequence.kv.lock, sequence.kv.cached_pages = lock, hit
        sequence.kv.pages = fresh if lock is None else lock.pages() + fresh
        cached = hit * self.pages.page_size
        sequence.restart(cached)
        if self.states is not None:
            matched = 0 if self.tree is None else self.tree.match(self._key(sequence), sequence.namespace)
            self.states.admitted(sequence, matched)
        forked, sequence.forked = sequence.forked, None
        if forked is not None and self.copy_page is not None and self.states is None:
            self._copy_tail(sequence, cached, *forked)
        self.queried_tokens += sequence.length
        self.hit_tokens += cached
        return True

    def _copy_tail(self, sequence: Sequence, cached: int, parent: Sequence, shared: int) -> None:
        """Have a fork begin behind what its parent has computed of the page on which they part, if that runs:
        no step writes these positions again, and none reads or writes the new page yet."""
        at, most = cached // self.pages.page_size, cached + self.pages.page_size
        stop = min(shared, parent.cursor.committed, sequence.cursor.reusable, most)
        same = parent.namespace == sequence.namespace and parent.kv.cacheable and parent.kv.arrival is None
        if same and stop > cached and at < len(parent.kv.pages):
            assert self.copy_page is not None
            self.copy_page(parent.kv.pages[at], sequence.kv.pages[at])
            sequence.restart(stop)

    def grow(self, sequence: Sequence) -> bool:
        """One more page for a running request."""
        fresh = self._take(1)
        if fresh is None:
            return False
        sequence.kv.pages += fresh
        return True

    def commit(self, sequence: Sequence, fence: int) -> bool:
        """Let others share the pages of a running request that are complete; True if its table changed.

        Where another request was faster with the same prefix, its pages take the place of ours.
        ``fence`` is the newest launched step that reads ours.
        """
        return self._commit(sequence, sequence.cursor.settled, fence)

    def _commit(self, sequence: Sequence, positions: int, fence: int) -> bool:
        changed = self._commit_pages(sequence, positions // self.pages.page_size, fence)
        if self.states is not None:
            self.states.settle(sequence)
        return changed

    def _commit_pages(self, sequence: Sequence, stop: int, fence: int) -> bool:
        start = sequence.kv.cached_pages
        if sequence.kv.lock is None or not sequence.kv.cacheable or stop <= start:
            return False
        assert self.tree is not None
        own = sequence.kv.pages[start:stop]
        size = self.pages.page_size
        kept = self.tree.extend(sequence.kv.lock, sequence.token_key(start * size, stop * size), own)
        if sequence.kv.lock.num_pages != stop:
            return False  # the prefix was flushed while it was being computed
        sequence.kv.cached_pages = stop
        if self.finder is not None:
            self.finder.committed(sequence, start, stop)
        doubles = [mine for mine, theirs in zip(own, kept, strict=True) if mine != theirs]
        self.pages.keep(len(own) - len(doubles))
        if not doubles:
            return False
        self.pages.give(doubles, fence)
        sequence.kv.pages[start:stop] = kept
        sequence.kv.sent_pages = min(sequence.kv.sent_pages, start)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back all a request holds. Sized by what was allocated, never by token counts."""
        fence = sequence.kv.last_step
        self._commit(sequence, sequence.cursor.committed, fence)
        if self.states is not None:
            self.states.release(sequence)
        kv, kept = sequence.kv, 0
        if kv.arrival is not None:
            kept = self.transfers.abandon(kv.arrival)
        self.pages.give(kv.pages[kv.cached_pages + kept :], fence)
        self._unlock(kv.lock, fence)
        if kv.arrival is None or not kv.arrival.slot:
            self.slots.give((kv.slot,), fence)
        kv.pages, kv.cached_pages = [], 0
        kv.slot, kv.lock, kv.arrival = 0, None, None

    def arrived(self, sequence: Sequence, pages: int) -> None:
        """The arrival of an admitted request has ended: its next ``pages`` are as if they had been cached."""
        kv = sequence.kv
        kv.arrival = None
        if pages:
            cached = kv.cached_pages + pages
            sequence.restart(cached * self.pages.page_size)
            self.hit_tokens += pages * self.pages.page_size
            if self.states is not None:
                self.states.arrived(sequence)

    def reclaim(self, arrival: Arrival) -> None:
        """An arrival that was abandoned has ended."""
        self.transfers.abandoned.remove(arrival)
        self.pages.give(arrival.pages, 0)
        if arrival.slot:
            self.slots.give((arrival.slot,), 0)

    def depart(self, lock: Lock) -> Departure:
        """Something copies the pages of a locked prefix until :meth:`departed`."""
        snapshot = None if self.states is None else lock.node.snapshot
        if snapshot is not None:
            snapshot.readers += 1
        departure = Departure(lock, snapshot)
        self.transfers.departures.add(departure)
        return departure

    def departed(self, departure: Departure) -> None:
        """Nothing copies these pages any more."""
        self.transfers.departures.remove(departure)
        if departure.snapshot is not None:
            departure.snapshot.readers -= 1
        self._unlock(departure.lock, 0)

    def rewind(self, sequence: Sequence, computed: int) -> int:
        """A running request is to continue from ``computed`` positions, with what is in flight for it void;
        returns from how many it can. Its table may have fewer pages than it needs then."""
        if self.states is None:
            return computed
        computed = self.states.rewind(sequence, computed)
        kv, pages = sequence.kv, computed // self.pages.page_size
        if pages < kv.cached_pages:
            # What others read is not written again, even with the same.
            assert kv.lock is not None
            assert self.states.tree is not None
            _, top = self.states.tree.deepest(kv.lock, pages)
            gone = self.states.tree.shorten(kv.lock, pages, top, kv.last_step)
            del kv.pages[pages : kv.cached_pages]
            kv.cached_pages = pages
            self._drop(gone)
        return computed

    def distrust(self, sequence: Sequence) -> None:
        """The KV of a request must not be shared, as far as no other request uses it yet; nor the features
        that it may come from."""
        sequence.kv.cacheable = False
        if self.features is not None:
            self.features.distrust(sequence)
        if self.tree is None or sequence.finished:
            return
        lock, copied = sequence.kv.lock, [each.lock for each in self.transfers.departures]
        if lock is None or self.states is not None:
            # What it left in the cache before it was retracted is found by its tokens; of a model with
            # recurrent state, its present lock need not reach so far.
            self._drop(self.tree.forget_key(self._key(sequence), sequence.namespace, copied))
        if lock is not None:
            self.tree.forget(lock, copied)
        if self.finder is not None:
            key = self._key(sequence)
            kept, size = self.tree.match(key, sequence.namespace), self.pages.page_size
            self.finder.distrusted(sequence, kept, sequence.cursor.reusable // size)

    # -- holds: what is evicted last ------------------------------------------------------------

    @property
    def held_pages(self) -> int:
        """Cached pages that are held, each counted once."""
        return 0 if self.tree is None else self.tree.holds.pages

    @property
    def held_pages_lost(self) -> int:
        """Pages that left the cache while they were held, since the start."""
        return 0 if self.tree is None else self.tree.holds.lost

    def hold(self, key: bytes, namespace: Hashable) -> Hold | None:
        """Have what is cached of a prefix evicted last, until :meth:`release_hold`; None without a cache."""
        return None if self.tree is None else self.tree.hold(key, namespace)

    def hold_again(self, hold: Hold | None) -> Hold | None:
        """Another hold on the same."""
        return None if self.tree is None or hold is None else self.tree.hold_again(hold)

    def release_hold(self, hold: Hold | None) -> None:
        """End a hold. Idempotent."""
        if self.tree is not None and hold is not None:
            self.tree.release_hold(hold)

    # -- flushing -------------------------------------------------------------------------------

    def flush(self) -> int:
        """Forget every cached prefix; returns how many pages that freed at once."""
        if self.tree is None:
            return 0
        gone = self.tree.flush()
        self._drop(gone)
        return sum(len(run) for run, _ in gone)

    def resolved(self, step_id: int) -> None:
        """Step ``step_id`` has resolved, and all before it."""
        self.pages.resolved(step_id)
        self.slots.resolved(step_id)
        if self.states is not None and self.states.pool is not None:
            self.states.pool.resolved(step_id)

    # -- inside ---------------------------------------------------------------------------------

    def _key(self, sequence: Sequence) -> bytes:
        size = self.pages.page_size
        return sequence.token_key(0, sequence.cursor.reusable // size * size)

    def _take(self, count: int) -> list[int] | None:
        """Free pages, cached ones if there are not enough; None if some are still being read."""
        short = count - self.pages.free
        if short > 0 and self.tree is not None:
            self.pages.drop(self.tree.evict(short, self.pages.last_resolved), self.pages.last_resolved)
        return None if count > self.pages.free else self.pages.take(count)

    def _unlock(self, lock: Lock | None, fence: int) -> None:
        if lock is not None:
            assert self.tree is not None
            self._drop(self.tree.unlock(lock, fence))

    def _drop(self, runs: Iterable[tuple[list[int], int]]) -> None:
        for run, fence in runs:
            self.pages.drop(run, fence)

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert conservation of pages and slots, in O(1)."""
        self.pages.check()
        self.slots.check()
        if self.tree is not None:
            self.tree.check()
            assert self.tree.num_pages == self.pages.cached
            assert self.tree.num_locks >= len(self.transfers.departures)
        if self.states is not None:
            self.states.check()

    def audit(self, running: Iterable[Sequence]) -> None:
        """Assert by walking that every page and slot is where it should be."""
        running = list(running)
        cached: list[int] = []
        if self.tree is not None:
            locks = [sequence.kv.lock for sequence in running if sequence.kv.lock is not None]
            cached = self.tree.audit([*locks, *(each.lock for each in self.transfers.departures)])
        abandoned = self.transfers.abandoned
        for sequence in running:
            if sequence.kv.lock is not None:
                assert sequence.kv.lock.pages() == sequence.kv.pages[: sequence.kv.cached_pages], sequence
        self.pages.audit(
            [
                *(page for sequence in running for page in sequence.kv.pages[sequence.kv.cached_pages :]),
                *(page for arrival in abandoned for page in arrival.pages),
            ],
            cached,
        )
        slots = [arrival.slot for arrival in abandoned if arrival.slot]
        self.slots.audit([*(sequence.kv.slot for sequence in running), *slots])
        if self.states is not None:
            self.states.audit(running, self.transfers.departures)
