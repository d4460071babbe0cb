"""LocalReplica: an engine on the dispatcher's own loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from aioinfer.cells import Outlet
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import EngineClosed, EngineFailed
from aioinfer.observe.observers import Observer, Observers
from aioinfer.observe.reporter import Reporter
from aioinfer.observe.tracing import Tracer
from aioinfer.outputs import AdapterInfo
from aioinfer.parallel.exchange import Exchange, check_pages
from aioinfer.parallel.holds import hold, warm
from aioinfer.parallel.reading import Reading, request_of
from aioinfer.parallel.record import Record, TimeLeft
from aioinfer.parallel.replica import Attempt, Replica, ReplicaEvents, ReplicaState, Stored
from aioinfer.parallel.rows import Rows
from aioinfer.parallel.stats import counts_of
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo, Progress
    from aioinfer.loop.holding import Kept, Prefix
    from aioinfer.loop.updating import UpdateMode, WeightSource
    from aioinfer.observe.stats import EngineStats
    from aioinfer.resuming.record import StreamCheckpoint
    from aioinfer.scheduling.step import Step

__all__ = ["LocalReplica"]


class LocalReplica(Replica):
    """Attempts are streams of the engine, read by an outlet: one call per step takes what it brought to all
    of them, and no task waits for any."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(name)
        self.engine = engine
        #: of its last start
        self._info: DeviceInfo | None = None
        #: with what its device decided
        self._config = engine.config
        #: statistics of the engine before, while it is started again
        self._last: EngineStats | None = None

    @property
    def info(self) -> DeviceInfo:
        return self._info or self.engine.info

    @property
    def slots(self) -> int:
        return self._config.running_requests

    @property
    def step_tokens(self) -> int:
        return self._config.step_tokens

    async def launch(self, progress: Progress | None = None) -> None:
        """Start the engine, if it is not started. Raises as :meth:`aioinfer.Engine.start`; EngineFailed and
        WrongLoop of one that is."""
        self.state = ReplicaState.STARTING
        if self.engine.closed:
            self._last = self.stats()
            await self.engine.start(progress)
            self.past, self._last = counts_of(self), None
        else:
            self.engine.cached_tokens(())  # raises unless it serves here
        self._info = self.engine.info
        self._config = self._info.settle(self.engine.config)
        await self.share_again()

    async def share(self, exchange: Exchange) -> None:
        check_pages(self.engine)
        store, in_files = exchange.store(), exchange.path is not None
        if store is not None:
            self.engine._started().transfers.attach(store, probed=in_files, owned=in_files)
        self.exchange = exchange

    async def start(self, events: ReplicaEvents) -> None:
        self.events = events
        self.state, self.cause = ReplicaState.READY, None
        self.engine.observe(_Watch(self))
        # The dispatcher has its own: a stream is one span, whatever becomes of its attempts.
        self.engine._started().observers.dismiss(Tracer, Reporter)

    # -- attempts -------------------------------------------------------------------------------

    def submit(self, attempt: Attempt, checkpoint: StreamCheckpoint | None, left: TimeLeft) -> None:
        record = attempt.record
        output = record.output
        request, images = request_of(record, left), output.images or ()
        stream = self.engine.queue(output.prompt_ids, request, checkpoint, images)
        reading = _Reading(self, attempt, stream, 0 if checkpoint is None else len(checkpoint.token_ids))
        attempt.handle = reading
        reading.begin(self._finished)

    def abort(self, attempt: Attempt) -> None:
        reading, attempt.handle = attempt.handle, None
        if reading is not None:
            reading.stream.leave()

    def caught_up(self, attempt: Attempt) -> None:
        if attempt.handle is not None:
            attempt.handle.mirror()
            attempt.handle.stream.caught_up()

    def moved(self, outlets: Sequence[Outlet]) -> None:
        """As in Lane: a step has moved these."""
        rows: list[tuple[Attempt, Rows]] = []
        for reading in cast("Sequence[_Reading]", outlets):
            if reading.stream.cell.max_lag is not None:
                reading.mirror()
            while reading.news:
                rows.append((reading.attempt, reading.take()))
        if rows:
            self.events.moved(rows)

    def _finished(self, reading: _Reading) -> None:
        attempt, error = reading.attempt, reading.output.error
        if isinstance(error, (EngineFailed, EngineClosed)) or self.engine.state in _GONE:
            cause = error if error is None or error.__cause__ is None else error.__cause__
            self.events.lost(self, cause or EngineClosed("its engine was closed"))
            return
        attempt.handle = None
        rows = [reading.take(ended=True)]
        while rows[-1].ending is None:  # of other weights
            rows.append(reading.take(ended=True))
        self.events.moved([(attempt, each) for each in rows])

    # -- the engine -----------------------------------------------------------------------------

    def cached(self, key: bytes, record: Record, pages: Sequence[int]) -> int:
        name, salt = record.request.adapter, record.namespace.salt
        if not self.engine.ready or (name is not None and not self.has(name)):
            return 0
        return self.engine._cached_tokens(key, salt, name)

    def stats(self) -> EngineStats | None:
        if self._last is not None or self._info is None:
            return self._last
        try:
            return self.engine.stats()
        except EngineClosed:
            return None  # it was given up while it started

    def follow(self, observers: Observers) -> None:
        self.engine.observe(_Steps(observers))

    def adapters(self) -> list[AdapterInfo]:
        return self.engine.adapters() if self.engine.ready else []

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        return await self.engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.engine.unload_adapter(name)

    async def pause(self) -> None:
        if self.engine.ready:
            with contextlib.suppress(EngineFailed, EngineClosed):  # which is noticed elsewhere
                await self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def flush_cache(self) -> int:
        return self.engine.flush_cache() if self.engine.ready else 0

    same_host = True

    async def store_prefix(self, prefix: Prefix) -> Stored:
        ids, salt, adapter = prefix
        return Stored(await self.engine.store_prefix(ids, cache_salt=salt, adapter=adapter))

    def hold(self, prefix: Prefix, seconds: float | None) -> Kept | None:
        return hold(self.engine, prefix, seconds) if self.engine.ready else None

    async def warm(self, prefix: Prefix, seconds: float | None) -> Kept | None:
        return await warm(self.engine, prefix, seconds)

    @property
    def weight_version(self) -> int:
        try:
            return self.engine.weight_version
        except EngineClosed:
            return 0  # it is starting

    async def update_weights(self, source: WeightSource, mode: UpdateMode, version: int) -> None:
        await self.engine.update_weights(source, mode=mode, version=version)

    async def aclose(self) -> None:
        if self.state is not ReplicaState.LOST:
            self.state = ReplicaState.CLOSED
        await self.engine.aclose()


_GONE = (EngineState.FAILED, EngineState.CLOSED)


class _Watch(Observer):
    """Sees an engine that is lost, or closed elsewhere, while it has nothing to do."""

    def __init__(self, replica: LocalReplica) -> None:
        self._replica = replica
        self._loop = asyncio.get_running_loop()

    def changed(self) -> None:
        self._replica.events.adapted()

    def failed(self, cause: BaseException) -> None:
        self._replica.events.lost(self._replica, cause)

    def closed(self) -> None:
        serves = self._replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
        if serves and not self._loop.is_closed():  # it was not closed here
            self.failed(EngineClosed("its engine was closed"))


class _Steps(Observer):
    """Passes on the steps of an engine."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers

    def stepped(self, step: Step, lag: float) -> None:
        self._observers.stepped(step, lag)


class _Reading(Reading):
    """One whose consumer's position is at hand."""

    __slots__ = ("attempt",)

    def __init__(self, replica: LocalReplica, attempt: Attempt, stream: Stream, resumed: int) -> None:
        super().__init__(replica, stream, resumed)
        self.attempt = attempt

    def mirror(self) -> None:
        """Unread output of the consumer is unread here, too."""
        own, consumer = self.stream.cell, self.attempt.record.cell
        own.taken_ids, own.blocked = consumer.taken_ids, not consumer.reading
