"""SocketReplica: an engine in another process, or on another machine, reached by a socket."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.errors import ConfigError, EngineError, EngineFailed, InvalidRequest
from aioinfer.loop.clock import clock_of
from aioinfer.loop.waiting import finish
from aioinfer.outputs import AdapterInfo, Draft
from aioinfer.parallel import messages
from aioinfer.parallel.connection import PATIENCE, SILENT, Connect, Connection, connector
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.holds import RemoteHolds
from aioinfer.parallel.prefixes import PAGE, RememberedPages
from aioinfer.parallel.reading import request_of
from aioinfer.parallel.record import Record, TimeLeft
from aioinfer.parallel.replica import Attempt, Replica, ReplicaEvents, ReplicaState, Stored
from aioinfer.parallel.rows import Rows, check
from aioinfer.parallel.stats import counts_of

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo, Progress
    from aioinfer.loop.holding import Kept, Prefix
    from aioinfer.observe.stats import EngineStats
    from aioinfer.parallel.exchange import Exchange
    from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["SocketReplica"]

_log = logging.getLogger("aioinfer")

#: the answer to Hello, and what follows it
_FIRST, _ANSWERS = messages.Decoder(messages.Welcome | messages.Refused), messages.Decoder(messages.Answers)


class SocketReplica(Replica):
    """Receives one frame per step. It is lost when its socket is closed, its process ends, or there is no
    frame for half a minute, and can be launched again then. After a second without a frame it gets no new
    work until it is heard again; what it computes waits."""

    guessed = True

    def __init__(self, address: str | Connect, name: str, *, token: str = "") -> None:
        """``address``: as in :func:`connector`, or what connects. Raises ConfigError."""
        super().__init__(name)
        self._connect = connector(address) if isinstance(address, str) else address
        self._token = token
        #: launches that were refused, by either side, by reason
        self.refused: Counter[str] = Counter()
        #: attempts that it has brought to an end since it was launched
        self.completed = 0
        #: as far as the dispatcher knows from what it has sent
        self.remembered = RememberedPages()
        self._link: _Link | None = None
        self._welcome: messages.Welcome | None = None
        self._stats: EngineStats | None = None
        #: names the engine that counts these
        self._life: str | None = None
        #: as far as it has told
        self._adapters: list[AdapterInfo] = []

    @property
    def info(self) -> DeviceInfo:
        return self._known.info

    @property
    def slots(self) -> int:
        return self._known.slots

    @property
    def step_tokens(self) -> int:
        return self._known.step_tokens

    @property
    def _known(self) -> messages.Welcome:
        if self._welcome is None:
            raise EngineError(f"the replica {self.name} has not started")
        return self._welcome

    # -- life -------------------------------------------------------------------------------------

    async def launch(self, progress: Progress | None = None) -> None:
        """Connect. Raises ConfigError: it is refused, by either side; EngineError: there is no answer."""
        await self._disconnect()
        self.begin_launch()
        link = _Link(self)
        try:
            await self._connect(lambda: link.connection)
            async with asyncio.timeout(PATIENCE):
                link.connection.send(messages.Hello(self._token))
                welcome = await link.welcome
        except BaseException as error:
            link.connection.abort()
            if isinstance(error, (OSError, FrameError)):
                raise EngineError(f"the replica {self.name} does not answer: {error!r}") from error
            if isinstance(error, ConfigError):
                self._refuse(str(error))
            raise
        if self._life not in (None, welcome.life):
            self.past = counts_of(self)
        self._link, self._welcome, self._stats, self._life = link, welcome, welcome.stats, welcome.life
        self._adapters = list(welcome.adapters)
        link.connection.begin_beats()
        await self.share_again()

    def begin_launch(self) -> None:
        """Forget what is known of an earlier process."""
        self.state, self.completed = ReplicaState.STARTING, 0
        self.remembered.clear()

    def _refuse(self, why: str) -> None:
        self.refused[why] += 1
        log = _log.warning if self.refused[why] == 1 else _log.debug
        log("the replica %s is not used: %s", self.name, why)

    async def start(self, events: ReplicaEvents) -> None:
        if self._link is None or self._link.connection.closed:
            raise EngineError(f"the replica {self.name} is not connected")
        self.events = events
        self.state, self.cause = ReplicaState.READY, None

    async def aclose(self) -> None:
        await self._disconnect()
        if self.state is not ReplicaState.LOST:
            self.state = ReplicaState.CLOSED

    def outlive_loop(self) -> None:
        if self._link is not None:
            self._link.connection.outlive_loop()
        self._link, self.events = None, ReplicaEvents()

    async def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.closing = True
            link.connection.abort()
            await asyncio.wait([link.connection.gone])

    # -- attempts ---------------------------------------------------------------------------------

    def submit(self, attempt: Attempt, checkpoint: StreamCheckpoint | None, left: TimeLeft) -> None:
        link, record = self._link, attempt.record
        if link is None or link.connection.closed:
            raise EngineFailed(f"the replica {self.name} is not connected")
        read = _read(record)
        order = messages.Submit.of(
            attempt.number,
            record.output.prompt_ids,
            request_of(record, left),
            checkpoint,
            read,
            () if record.output.images is None else record.output.images.sources,
        )
        try:
            link.connection.send(order)
        except FrameError as error:
            raise InvalidRequest("prompt", f"the request cannot be sent to a replica: {error}") from error
        attempt.read = read
        link.sent[attempt.number] = attempt

    def abort(self, attempt: Attempt) -> None:
        link = self._link
        if link is not None and link.sent.pop(attempt.number, None) is not None:
            link.connection.send(messages.Abort(attempt.number))

    def caught_up(self, attempt: Attempt) -> None:
        if self._link is not None:
            self._link.tell_read(attempt)

    def cached(self, key: bytes, record: Record, pages: Sequence[int]) -> int:
        return self.remembered.leading(pages) * PAGE

    def remember(self, pages: Sequence[int]) -> None:
        if self._stats is not None and self._known.caches:
            self.remembered.add(pages, self._stats.pages_total * (self.info.page_size or PAGE) // PAGE)

    # -- pages ------------------------------------------------------------------------------------

    async def share(self, exchange: Exchange) -> None:
        path = exchange.path if self.same_host else None
        directory = None if path is None else os.fsencode(path)
        answer = await self._ask(lambda number: messages.Share(number, exchange.max_bytes, directory))
        if answer.why:
            raise ConfigError(answer.why)
        self.exchange = exchange

    async def store_prefix(self, prefix: Prefix) -> Stored:
        answer = await self._ask(lambda number: messages.Store(number, *prefix))
        return Stored(answer.tokens, answer.names)

    async def fetch(self, name: bytes, at: int) -> tuple[int, bytes]:
        answer = await self._ask(lambda number: messages.Fetch(number, name, at))
        return answer.total, answer.data

    async def give(self, name: bytes, at: int, total: int, data: bytes) -> bool:
        answer = await self._ask(lambda number: messages.Keep(number, name, at, total, data))
        kept: bool = answer.kept
        return kept

    def hold(self, prefix: Prefix, seconds: float | None) -> Kept | None:
        link = self._link
        if link is None or link.connection.closed:
            return None
        return link.holds.new(lambda number: messages.Hold(number, *prefix, seconds))

    async def warm(self, prefix: Prefix, seconds: float | None) -> Kept | None:
        link = self._link
        answer = await self._ask(
            lambda number: messages.Hold(number, *prefix, seconds, compute=True), messages.Release
        )
        if answer.error is not None:
            raise answer.error
        return None if link is None or link.connection.closed else link.holds.made(answer)

    async def _ask(
        self,
        order: Callable[[int], messages.Message],
        cancel: Callable[[int], messages.Message] | None = None,
    ) -> Any:
        """As in _Link. Raises EngineFailed."""
        link = self._link
        if link is None or link.connection.closed:
            raise EngineFailed(f"the replica {self.name} is not connected")
        return await link.ask(order, cancel)

    # -- statistics and weights ---------------------------------------------------------------------

    def measured(self, stats: EngineStats) -> None:
        self.note_version(stats.weight_version)
        self._stats = stats

    @property
    def ended(self) -> bool:
        """Its process, if it was started here, has ended."""
        return False

    no_updates = "engines in other processes are given weights there"

    @property
    def weight_version(self) -> int:
        """Newest version that it has reported."""
        if self._stats is None or self.state is ReplicaState.STARTING:
            return 0
        return self._stats.weight_version

    def note_version(self, version: int) -> None:
        if self._stats is not None and version > self._stats.weight_version:
            self._stats = dataclasses.replace(self._stats, weight_version=version)
            self.events.adapted()

    # -- the engine -------------------------------------------------------------------------------

    def stats(self) -> EngineStats | None:
        """Statistics of the last quarter of a second, or from before it was lost or closed."""
        return self._stats

    def adapters(self) -> list[AdapterInfo]:
        return self._adapters

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter from a path on the replica's machine."""
        adapters = await self._adapt(name, path)
        for each in adapters:
            if each.name == name:
                return each
        raise EngineError(f"the replica {self.name} has loaded the adapter {name!r}, and does not name it")

    async def unload_adapter(self, name: str) -> None:
        await self._adapt(name, None)

    async def _adapt(self, name: str, path: str | None) -> Sequence[AdapterInfo]:
        at = None if path is None else os.fsencode(path)
        answer: messages.Adapted = await self._ask(
            lambda number: messages.Adapt(number, name, at), messages.Adapt
        )
        if answer.error is not None:
            raise answer.error
        return answer.adapters

    def adapted(self, adapters: Sequence[AdapterInfo]) -> None:
        """Note the adapters that are there now."""
        self._adapters = list(adapters)
        self.events.adapted()

    async def pause(self) -> None:
        link = self._link
        if link is not None and not link.connection.closed:
            link.connection.send(messages.Pause())
            paused = link.connection.gone.get_loop().create_future()
            link.pausing.append(paused)
            await paused

    def resume(self) -> None:
        if self._link is not None:
            self._link.connection.send(messages.Resume())

    def flush_cache(self) -> int:
        """Empty the prefix cache. Pages that can be freed, by its last statistics."""
        if self._link is None or self._stats is None:
            return 0
        self._link.connection.send(messages.Flush())
        self.remembered.clear()
        return self._stats.pages_evictable


class _Link:
    """The dispatcher's end of one connection to a replica."""

    def __init__(self, replica: SocketReplica) -> None:
        self._replica = replica
        self._loop = asyncio.get_running_loop()
        self._clock = clock_of(self._loop)
        self.connection = Connection(self, _FIRST)
        #: what the replica is
        self.welcome: asyncio.Future[messages.Welcome] = self._loop.create_future()
        #: attempts by number
        self.sent: dict[int, Attempt] = {}
        #: what waits until no step is in flight
        self.pausing: list[asyncio.Future[None]] = []
        #: what waits for an answer, by number
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.numbers = itertools.count(1)
        self.holds = RemoteHolds(self.connection.send, self.numbers)
        #: this end closes it
        self.closing = False

    async def ask(
        self,
        order: Callable[[int], messages.Message],
        cancel: Callable[[int], messages.Message] | None = None,
    ) -> Any:
        """Send an order with a number, and wait for its answer. ``cancel``: the order that is sent when this
        is cancelled, and the answer waited for; None: it is not. Raises EngineFailed."""
        number = next(self.numbers)
        waiting: asyncio.Future[Any] = self._loop.create_future()
        self._asked[number] = waiting
        try:
            self.connection.send(order(number))
            if cancel is None:
                return await waiting
            return await finish(waiting, lambda: self.connection.send(cancel(number)))
        finally:
            del self._asked[number]
            if waiting.done() and not waiting.cancelled():
                waiting.exception()  # the caller that waited may have left

    def _answer(self, message: messages.Numbered) -> None:
        waiting = self._asked.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    # -- as End -----------------------------------------------------------------------------------

    def connected(self) -> None:
        self.connection.trust(_FIRST)

    def received(self, message: messages.Welcome | messages.Refused | messages.Answers) -> None:
        if self._replica.silent:
            self._replica.silent = False
            self._replica.events.adapted()
        match message:
            case messages.StepRows():
                check(message.rows, self._replica.info.vocab_size)
                self._rows(message.rows)
            case messages.Stats():
                self._replica.measured(message.stats)
            case messages.Paused():
                if self.pausing:
                    _set(self.pausing.pop(0))
            case messages.Held():
                self.holds.held(message)
                self._answer(message)
            case messages.Adapted():
                self._replica.adapted(message.adapters)
                self._answer(message)
            case messages.Shared() | messages.Stored() | messages.Fetched() | messages.Kept():
                self._answer(message)
            case messages.Leaving():
                self._replica.events.leaving(self._replica)
            case messages.Lost():
                self.connection.abort(EngineFailed(message.reason))
            case messages.Welcome():
                self.connection.trust(_ANSWERS)
                if not self.welcome.done():
                    self.welcome.set_result(message)
            case messages.Refused():
                if not self.welcome.done():
                    self.welcome.set_exception(ConfigError(f"it refuses: {message.reason}"))

    def beat(self) -> messages.Ping:
        replica = self._replica
        if self.connection.silence >= SILENT and not replica.silent:
            _log.info("the replica %s is silent: it gets no new work until it is heard", replica.name)
            replica.silent = True
            replica.events.adapted()
        if replica.silent and replica.ended:  # and others have its socket, too
            self.connection.abort(EngineFailed("its process has ended"))
        return messages.Ping()

    def fill(self) -> bool:
        return False

    def ended(self, cause: BaseException | None) -> None:
        self._replica.silent = False
        self.holds.close()
        for paused in self.pausing:
            _set(paused)
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EngineFailed("the connection of the replica was closed"))
        if not self.welcome.done():
            self.welcome.set_exception(cause or EngineError("it has closed the connection"))
            self.welcome.exception()  # the caller that waited may have left
        elif not self.closing:
            self._replica.events.lost(self._replica, cause or EngineFailed("its connection was closed"))

    # -- rows -------------------------------------------------------------------------------------

    def _rows(self, rows: list[tuple[int, Rows]]) -> None:
        found: list[tuple[Attempt, Rows]] = []
        lagging: list[Attempt] = []
        for number, row in rows:
            attempt = self.sent.get(number)
            if attempt is None:
                continue  # it is not wanted any more
            if row.admitted_at is not None:
                row.admitted_at = self._clock() - row.admitted_at
                if attempt.record.request.params.prompt_logprobs is None:  # else nothing was looked for
                    self._replica.remembered.found(attempt.pages, -(-row.cached_tokens // PAGE))
            if row.draft is not None:
                row.draft = _newest(row.draft(), attempt.record)
            found.append((attempt, row))
            if row.ending is not None:
                del self.sent[number]
                self._replica.completed += row.ending.error is None
            elif attempt.record.request.max_lag is not None:
                lagging.append(attempt)
        if found:
            self._replica.events.moved(found)
        for attempt in lagging:
            self.tell_read(attempt)

    # -- what consumers have read -----------------------------------------------------------------

    def tell_read(self, attempt: Attempt) -> None:
        """Tell the replica how far the consumer has read: at half of what it may leave unread, or later when
        it has read more. The replica parks a request by what it was told."""
        record = attempt.record
        most = record.request.max_lag
        if attempt.ended or most is None:
            return
        read = _read(record)
        if read - attempt.read > most // 2:
            attempt.read = read
            self.connection.send(messages.Read(attempt.number, read))
        elif len(record.output.token_ids) - attempt.read > most // 2:
            record.cell.parked = True  # with what it reads next


def _read(record: Record) -> int:
    """Tokens of the output that its consumer has read, or waits for."""
    cell = record.cell
    return len(record.output.token_times) if cell.reading else cell.taken_ids


def _newest(draft: Draft | None, record: Record) -> Callable[[], Draft | None]:
    """Makes a draft that follows the output, until that grows."""
    return lambda: draft if draft is not None and draft.start == len(record.output.token_ids) else None


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
