"""PageTransfers: carries KV pages between the engine's memory and page stores, beside the steps.

::

    admitted request ──► names of its next pages ──► a store has them ──► a worker fills its pages ──► prefill
    pages committed  ──► names, queued ──► a worker puts them into the stores that are written behind

A page is known by its name (:mod:`aioinfer.cache.names`), which says all that its KV depends on. So whatever
goes wrong with a store is a miss, and what a store has is used as if this engine had computed it. Scheduling
state is touched on the loop only; workers touch the bytes of pages that no step accesses.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from aioinfer.cache.names import extend_names, root_of
from aioinfer.cache.namespace import Namespace
from aioinfer.cache.nodes import Node
from aioinfer.cache.radix import token_key
from aioinfer.errors import ConfigError
from aioinfer.execution.device import HostPages
from aioinfer.execution.workers import WorkerExecutor
from aioinfer.loop.waiting import finish
from aioinfer.scheduling.arrivals import Arrival, Departure

if TYPE_CHECKING:
    from aioinfer.loop.core import Core
    from aioinfer.scheduling.sequence import Sequence as Request
    from aioinfer.tiers.store import PageStore, Views

__all__ = ["PageTransfers"]

_log = logging.getLogger("aioinfer")

#: pages that are locked for writing at a time, and that are read between two looks at what is still wanted
_MOST = 64
#: runs of pages that wait to be written; the oldest are dropped
_WAITING = 4096
#: seconds between two looks for what other processes have stored
_REFRESH = 5.0
#: seconds without a page that requests wait for a store, and that closing waits for workers: a disk may hang
_PATIENCE = 10.0


class _Fresh(NamedTuple):
    """Pages that were committed: those from ``start`` on of the prefix that ends with a node."""

    node: Node
    start: int
    names: Sequence[bytes]


class _Use(NamedTuple):
    """The arguments of :meth:`PageTransfers.attach`."""

    behind: bool
    probed: bool
    only_read: bool
    owned: bool

    @property
    def meant(self) -> bool:
        """What is there was put there for this engine to read."""
        return self.probed or self.only_read


class PageTransfers:
    """The transfers of one engine, on its loop. Without stores it does nothing, and nothing asks it."""

    def __init__(
        self,
        core: Core,
        device: object,
        loop: asyncio.AbstractEventLoop,
        *,
        wake: Callable[[], None],
        nudge: Callable[[], None],
        lost: Callable[[BaseException], None],
    ) -> None:
        """``wake``: something may be planned now. ``nudge``: the same, which interrupts no step of several
        rounds. ``lost``: the state of the scheduler is wrong."""
        self._core = core
        self._memory = core.scheduler.memory
        self._size = self._memory.pages.page_size
        self._device = cast("HostPages", device)  # as attach() makes sure
        self._loop = loop
        self._wake = wake
        self._nudge = nudge
        self._lost = lost
        self._stores: dict[PageStore, _Use] = {}
        self._readers = WorkerExecutor(2, "aioinfer-pages-in")
        self._writers = WorkerExecutor(1, "aioinfer-pages-out")
        #: of arrivals under way, to look at what has come, and those that did not come in time
        self._timers: dict[Arrival, asyncio.TimerHandle] = {}
        self._late: set[Arrival] = set()
        self._roots: dict[Namespace, bytes] = {}
        self._fresh: deque[_Fresh] = deque(maxlen=_WAITING)
        self._writing = self._due = False
        self._closed = False
        #: what workers do, and what of it takes long
        self._working: set[asyncio.Future[int]] = set()
        self._hanging: set[asyncio.Future[int]] = set()
        self._refreshed = core.clock()

    # -- stores ---------------------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        """Pages can be copied to and from stores."""
        cached = self._memory.tree is not None
        return cached and bool(self._core.info.page_bytes) and isinstance(self._device, HostPages)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page to one that no step reads or writes yet, at once. Only if it is possible."""
        assert isinstance(self._device, HostPages)
        pages = self._device.page_views(source), self._device.page_views(target)
        for theirs, mine in zip(*pages, strict=True):
            mine[:] = theirs

    def attach(
        self,
        store: PageStore,
        *,
        behind: bool = False,
        probed: bool = False,
        only_read: bool = False,
        owned: bool = False,
    ) -> None:
        """Have admitted requests look for their pages in a store.

        Args:
            behind: everything that is committed is put there.
            probed: look for what others have stored just now, on the loop: a store in memory.
            only_read: nothing is put there.
            owned: it is closed with the engine.

        Raises ConfigError: there is no prefix cache, or pages cannot be copied.
        """
        if self._memory.tree is None:
            raise ConfigError("prefix_cache_dir: this engine has no prefix cache")
        if not self.possible:
            raise ConfigError("prefix_cache_dir: KV pages in the memory of a GPU cannot be stored yet")
        self._stores[store] = _Use(behind, probed, only_read, owned)
        self._memory.finder = self

    def detach(self, store: PageStore) -> None:
        """Do not look there any more; reads that have begun go on. Idempotent."""
        self._stores.pop(store, None)
        if not self._stores:
            self._memory.finder = None
            self._fresh.clear()

    def root(self, namespace: Namespace, adapter_fingerprint: str = "") -> bytes | None:
        """Root of the names of the pages of a namespace; None if nothing of it is stored: other weights than
        those of the start have no name."""
        if namespace.weights:
            return None
        root = self._roots.get(namespace)
        if root is None:
            info = self._core.info
            # What a position attends to ends with its block.
            parts = (info.fingerprint, info.numerics, info.page_layout, str(self._size), str(info.block_size))
            root = root_of((*parts, adapter_fingerprint, namespace.salt))
            if len(self._roots) > _WAITING:
                self._roots.clear()
            self._roots[namespace] = root
        return root

    def _names(self, request: Request, pages: int) -> list[bytes]:
        """The names of a request's first ``pages``; none if it has none."""
        fingerprint = "" if request.adapter is None else request.adapter.fingerprint
        root, names = self.root(request.namespace, fingerprint), request.kv.names
        if root is None:
            return []
        if len(names) < pages:
            key = request.token_key(len(names) * self._size, pages * self._size)
            extend_names(names, root, key, 4 * self._size)
        return names[:pages]

    # -- in: as PageFinder ----------------------------------------------------------------------

    def find(self, sequence: Request) -> Arrival | None:
        first, last = sequence.kv.cached_pages, sequence.cursor.reusable // self._size
        if last <= first or self._closed or self._late:
            return None
        self._refresh()
        wanted = self._names(sequence, last)[first:]
        if not wanted:
            return None
        states = self._memory.states is not None
        for store, use in self._stores.items():
            if use.probed:
                store.refresh(wanted, states=states)
        found = [(store.leading(wanted, states=states), store) for store in self._stores]
        count, store = max(found, key=lambda each: each[0])
        if not count or not (
            self._stores[store].meant or self._core.rates.reading_pays(first * self._size, count * self._size)
        ):
            return None
        pages, slot = sequence.kv.pages[first : first + count], sequence.kv.slot
        arrival = Arrival(sequence.key, wanted[:count], pages, slot if states else 0)
        work = partial(_fill, self._device, store, arrival, arrival.slot)
        filled = partial(self._filled, arrival, self._core.clock())
        if not self._begin(self._readers, work, filled):
            return None
        self._watch(arrival)
        return arrival

    def _watch(self, arrival: Arrival) -> None:
        self._timers[arrival] = self._loop.call_later(_PATIENCE, self._look, arrival, arrival.filled)

    def _look(self, arrival: Arrival, filled: int) -> None:
        """A disk may hang: a request whose pages do not come is admitted again, and computes them."""
        if arrival.abandoned:
            return
        if arrival.filled > filled:
            self._watch(arrival)
            return
        self._late.add(arrival)
        _log.error("no page has come from a store for %g s; until one does, they are computed", _PATIENCE)
        scheduler = self._core.scheduler
        scheduler.retract(scheduler.queues.arriving[arrival.key])
        self._wake()

    def _filled(self, arrival: Arrival, begun: float, count: int) -> None:
        self._timers.pop(arrival).cancel()
        self._late.discard(arrival)
        transfers, missing = self._memory.transfers, len(arrival.names) - count
        if not arrival.abandoned:
            transfers.arrived += count
            transfers.failed += missing
            self._core.rates.arrived(count * self._size, self._core.clock() - begun)
        self._core.scheduler.queues.landed(arrival, count)
        self._wake()

    # -- out ------------------------------------------------------------------------------------

    def committed(self, sequence: Request, start: int, stop: int) -> None:
        if not any(use.behind for use in self._stores.values()):
            return
        names = self._names(sequence, stop)
        if names:
            assert sequence.kv.lock is not None
            self._fresh.append(_Fresh(sequence.kv.lock.node, start, names[start:]))
            if not self._due:
                # Later: the snapshot of a recurrent state follows its pages into the cache.
                self._due = True
                self._loop.call_soon(self._write_next)

    def distrusted(self, sequence: Request, start: int, stop: int) -> None:
        names = self._names(sequence, stop)[start:]
        if names and not self._closed:
            # Behind what is being written.
            self._begin(self._writers, partial(_forget, [*self._stores], names), _ignore)

    def _write_next(self) -> None:
        """Have a worker write what was committed, one run of pages at a time."""
        tree, self._due = self._memory.tree, False
        assert tree is not None
        while self._fresh and not (self._writing or self._closed):
            node, start, names = self._fresh.popleft()
            if len(names) > _MOST:
                self._fresh.appendleft(_Fresh(node, start + _MOST, names[_MOST:]))
                names = names[:_MOST]
            try:
                departure = self._memory.depart(tree.lock_node(node))
            except RuntimeError:
                continue  # it was evicted before
            stores = [store for store, use in self._stores.items() if use.behind]
            work = self._put(departure, start, names, stores)
            self._writing = self._begin(self._writers, work, partial(self._written, departure))
            if not self._writing:
                self._memory.departed(departure)

    def _put(
        self, departure: Departure, start: int, names: Sequence[bytes], stores: Iterable[PageStore]
    ) -> Callable[[], int]:
        """Work that puts the pages from ``start`` on of a locked prefix into stores, as far as it reaches."""
        pages = departure.lock.pages()
        cell = 0
        if departure.snapshot is not None and start + len(names) >= len(pages):
            cell = self._memory.slots.total + departure.snapshot.item
        part = pages[start : start + len(names)]
        return partial(_put_all, self._device, list(stores), list(zip(names, part, strict=False)), cell)

    def _written(self, departure: Departure, count: int) -> None:
        self._writing = False
        self._memory.departed(departure)
        self._memory.transfers.stored += count
        self._write_next()
        self._nudge()

    async def store(
        self,
        ids: Sequence[int],
        namespace: Namespace,
        adapter_fingerprint: str = "",
        into: PageStore | None = None,
    ) -> int:
        """Put the pages of a cached prefix into a store, by default into all that are attached; returns how
        many of the tokens it has then, counted from the first. What is not cached is not computed; what is
        resolved of requests that run is cached now."""
        tree, root = self._memory.tree, self.root(namespace, adapter_fingerprint)
        stores = [each for each, use in self._stores.items() if not use.only_read] if into is None else [into]
        if tree is None or root is None or not stores:
            return 0
        for sequence in self._core.scheduler.queues.running.values():
            if sequence.namespace == namespace:
                self._core.commit(sequence)
        names: list[bytes] = []
        extend_names(names, root, token_key(ids), 4 * self._size)
        departure = self._memory.depart(tree.lock(token_key(ids[: len(names) * self._size]), namespace))
        work = self._put(departure, 0, names, stores)
        try:
            return await finish(self._run(self._writers, work)) * self._size
        finally:
            self._memory.departed(departure)
            self._wake()

    # -- workers --------------------------------------------------------------------------------

    def _begin(self, executor: WorkerExecutor, work: Callable[[], int], done: Callable[[int], None]) -> bool:
        """Have a worker do something, and ``done`` called with what it returns, 0 if it raises. False if it
        cannot begin."""
        try:
            future = self._run(executor, work)
        except RuntimeError as error:  # no thread, or closed
            _log.warning("pages are not transferred: %s", error)
            return False
        future.add_done_callback(partial(self._ended, done))
        return True

    def _run(self, executor: WorkerExecutor, work: Callable[[], int]) -> asyncio.Future[int]:
        """Have a worker do something. Raises RuntimeError."""
        future = self._loop.run_in_executor(executor, work)
        self._working.add(future)
        timer = self._loop.call_later(_PATIENCE, self._hangs, future)
        future.add_done_callback(partial(self._has_ended, timer))
        return future

    def _hangs(self, future: asyncio.Future[int]) -> None:
        """A worker takes long: what lacks the pages that it has is not to wait for them."""
        self._hanging.add(future)
        self._memory.transfers.hung = True
        self._wake()

    def _has_ended(self, timer: asyncio.TimerHandle, future: asyncio.Future[int]) -> None:
        timer.cancel()
        self._working.discard(future)
        self._hanging.discard(future)
        self._memory.transfers.hung = bool(self._hanging)

    def _ended(self, done: Callable[[int], None], future: asyncio.Future[int]) -> None:
        count = 0
        if not future.cancelled():
            error = future.exception()
            if error is None:
                count = future.result()
            else:
                _log.error("a transfer of pages failed", exc_info=error)
        try:
            done(count)
        except Exception as error:
            self._lost(error)

    def _refresh(self) -> None:
        """Look for what other processes have stored, now and then."""
        if self._core.clock() - self._refreshed < _REFRESH:
            return
        self._refreshed = math.inf  # until this has ended
        if not self._begin(self._writers, partial(_refresh, [*self._stores]), self._looked):
            self._looked(0)

    def _looked(self, _: int) -> None:
        self._refreshed = self._core.clock()

    async def aclose(self, seconds: float = 0.0) -> None:
        """Write what was committed, for at most so many seconds, and wait for the workers. No step is
        computed any more."""
        end = self._loop.time() + seconds
        while self._working and self._fresh and (left := end - self._loop.time()) > 0:
            await asyncio.wait(self._working, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        self._closed = True
        self._fresh.clear()
        if self._working:
            await asyncio.wait(self._working, timeout=_PATIENCE)
        if self._working:
            _log.error(
                "%d transfers of pages have not ended; their threads are left behind", len(self._working)
            )
        self.close()

    def close(self) -> None:
        """Let the threads end."""
        self._closed = True
        self._fresh.clear()
        for timer in self._timers.values():
            timer.cancel()
        for executor in (self._readers, self._writers):
            executor.shutdown(wait=False, cancel_futures=True)
        for store, use in self._stores.items():
            if use.owned:
                store.close()
        self._stores.clear()


def _fill(device: HostPages, store: PageStore, arrival: Arrival, cell: int) -> int:
    """Fill the pages of an arrival, on a worker thread; returns how many of the first are right. ``cell``: of
    the state at their end, which is right if all of them are, else none is; 0: there is none."""
    done, count = 0, len(arrival.pages)
    while done < count and not arrival.abandoned:
        stop = min(count, done + _MOST)
        pages = [device.page_views(page) for page in arrival.pages[done:stop]]
        states: list[Views | None] = [None] * len(pages)
        if cell and stop == count:
            states[-1] = device.state_views(cell)
        right = store.read(arrival.names[done:stop], pages, states)
        done += right
        arrival.filled = done
        if right < len(pages):
            break
    return 0 if cell and done < count else done


def _put_all(
    device: HostPages, stores: Sequence[PageStore], pages: Sequence[tuple[bytes, int]], cell: int
) -> int:
    """Put pages into stores, on a worker thread; returns how many of the first they all have then. ``cell``:
    of the state after the last of them; 0: none."""
    whole = 0
    for at, (name, page) in enumerate(pages, 1):
        state = device.state_views(cell) if cell and at == len(pages) else None
        kept = True
        for store in stores:
            if not (store.has(name) if state is None else store.has_state(name)):
                kept = store.put(name, device.page_views(page), state) and kept
        whole += kept and whole == at - 1
    return whole


def _refresh(stores: Iterable[PageStore]) -> int:
    for store in stores:
        store.refresh()
    return 0


def _forget(stores: Iterable[PageStore], names: Sequence[bytes]) -> int:
    for store in stores:
        store.forget(names)
    return 0


def _ignore(_: int) -> None:
    """Nothing follows."""
