"""SharedPages: what an engine stores for the other replicas of its dispatcher, and gets from them."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioinfer.cache.names import extend_names
from aioinfer.cache.namespace import Namespace
from aioinfer.cache.radix import token_key
from aioinfer.execution.device import HostPages
from aioinfer.parallel import messages
from aioinfer.parallel.exchange import check_pages
from aioinfer.tiers.directory import DirectoryStore
from aioinfer.tiers.memory import MemoryStore

if TYPE_CHECKING:
    from aioinfer.engine import Engine
    from aioinfer.tiers.store import PageStore

__all__ = ["SharedPages"]

_log = logging.getLogger("aioinfer")

#: pages that come in at the same time; the first of more are given up
_MOST_COMING = 32


class SharedPages:
    """Answers the orders of one connection that are about pages, and no others; on the loop of the engine."""

    def __init__(
        self, engine: Engine, order: messages.Share, send: Callable[[messages.Message], None]
    ) -> None:
        """Raises ConfigError: pages of this engine cannot be shared, or not there."""
        check_pages(engine)
        self._engine = engine
        self._send = send
        self._store: PageStore = (
            MemoryStore(order.max_bytes)
            if order.directory is None
            else DirectoryStore(os.fsdecode(order.directory), order.max_bytes)
        )
        self._transfers = engine._started().transfers
        self._transfers.attach(self._store, probed=order.directory is not None)
        self._storing: set[asyncio.Task[int]] = set()
        #: the page that was fetched last, and those that come in
        self._out: tuple[bytes, bytes] = b"", b""
        self._in: dict[bytes, bytearray] = {}

    def store(self, order: messages.Store) -> None:
        """As the message says."""
        work = self._engine.store_prefix(order.ids, cache_salt=order.cache_salt, adapter=order.adapter)
        task = asyncio.get_running_loop().create_task(work, name="aioinfer-pages")
        self._storing.add(task)
        # Its adapter may be gone when this has ended.
        task.add_done_callback(functools.partial(self._stored, order, self._root(order)))

    def _stored(self, order: messages.Store, root: bytes | None, task: asyncio.Task[int]) -> None:
        self._storing.discard(task)
        if task.cancelled():
            return
        tokens, names = 0, list[bytes]()
        if (error := task.exception()) is not None:
            _log.debug("a prefix was not stored: %r", error)
        else:
            tokens = task.result()
        if root is not None and (size := self._engine.info.page_size):
            extend_names(names, root, token_key(order.ids[:tokens]), 4 * size)
        self._send(messages.Stored(order.number, tokens, names))

    def _root(self, order: messages.Store) -> bytes | None:
        """Of the names of its pages; None: they have none."""
        core = self._engine._started().core
        uid, fingerprint = 0, ""
        if order.adapter is not None:
            if order.adapter not in core.adapters.loaded:
                return None
            version = core.adapters.find(order.adapter)
            uid, fingerprint = version.uid, version.fingerprint
        return self._transfers.root(Namespace(order.cache_salt, uid, core.weight_version), fingerprint)

    def fetch(self, order: messages.Fetch) -> None:
        """As the message says."""
        if self._out[0] != order.name:
            self._out = order.name, self._read(order.name)
        page = self._out[1]
        piece = page[order.at : order.at + messages.PIECE]
        self._send(messages.Fetched(order.number, len(page), piece))

    def _read(self, name: bytes) -> bytes:
        """A page, and its state if there is one; empty: it is not there."""
        size, more = self._sizes
        state = more if more and self._store.has_state(name) else 0
        whole = bytearray(size + state)
        view = memoryview(whole)
        found = self._store.read([name], [[view[:size]]], [[view[size:]] if state else None])
        return bytes(whole) if found else b""

    @property
    def _sizes(self) -> tuple[int, int]:
        """Bytes of a page, and of a recurrent state."""
        runtime = self._engine._started()
        device, state = runtime.launcher.device, 0
        if runtime.core.scheduler.memory.states is not None and isinstance(device, HostPages):
            state = sum(len(view) for view in device.state_views(0))
        return self._engine.info.page_bytes, state

    def keep(self, order: messages.Keep) -> None:
        """As the message says."""
        self._send(messages.Kept(order.number, self._keep(order)))

    def _keep(self, order: messages.Keep) -> bool:
        size, state = self._sizes
        if order.total not in (size, size + state):
            return False
        name, end = order.name, order.at + len(order.data)
        there = self._store.has_state(name) if order.total > size else self._store.has(name)
        if there or len(self._in.get(name, b"")) >= end:
            return True  # it comes for two streams
        if not order.at:
            self._in.pop(name, None)
            if len(self._in) >= _MOST_COMING:
                del self._in[next(iter(self._in))]
            self._in[name] = bytearray()
        data = self._in.get(name)
        if data is None or len(data) != order.at or end > order.total:
            return False
        data += order.data
        if end < order.total:
            return True
        view = memoryview(self._in.pop(name))
        return self._store.put(name, [view[:size]], [view[size:]] if order.total > size else None)

    def close(self) -> None:
        """The connection has ended."""
        for task in self._storing:
            task.cancel()
        self._transfers.detach(self._store)
        self._store.close()
