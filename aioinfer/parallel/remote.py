"""SocketReplica: an engine in another process, or on another machine, behind a socket."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aioinfer.errors import ConfigError, EngineError, EngineFailed, InvalidRequest
from aioinfer.loop.clock import clock_of
from aioinfer.outputs import AdapterInfo, Draft, TokenLogprob
from aioinfer.parallel.connection import BEAT, MISSES, PATIENCE, Connect, Connection, connector
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.load import PAGE, RememberedPages
from aioinfer.parallel.messages import (
    Abort,
    Adapt,
    Adapted,
    Answers,
    Decoder,
    Flush,
    Hello,
    Leaving,
    Lost,
    Pause,
    Paused,
    Ping,
    Read,
    Refused,
    Resume,
    Stats,
    StepRows,
    Submit,
    Welcome,
)
from aioinfer.parallel.reading import options_of
from aioinfer.parallel.record import Attempt, Record
from aioinfer.parallel.replica import Replica, ReplicaEvents, ReplicaState, Rows
from aioinfer.parallel.rows import unpacked
from aioinfer.scheduling.request import ParkedFor
from aioinfer.stream import StreamCell
from aioinfer.waiting import finish

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo, Progress
    from aioinfer.observe.stats import EngineStats
    from aioinfer.resuming.record import StreamCheckpoint
    from aioinfer.scheduling.request import Request

__all__ = ["SocketReplica"]

_log = logging.getLogger("aioinfer")

_READER = frozenset({ParkedFor.READER})
#: the answer to Hello, and what follows it
_FIRST, _ANSWERS = Decoder(Welcome | Refused), Decoder(Answers)


class _Sent:
    """An attempt that the replica has."""

    __slots__ = ("admitted_at", "attempt", "prompt_logprobs", "read")

    def __init__(self, attempt: Attempt, read: int) -> None:
        self.attempt = attempt
        self.admitted_at: float | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        #: tokens that the replica knows to be read
        self.read = read


class SocketReplica(Replica):
    """What it computes comes in one frame per step; a socket that is closed, or silent for three quarters of
    a second, is the end of it. It can be launched again then."""

    def __init__(self, address: str | Connect, name: str, *, token: str = "", fingerprint: str = "") -> None:
        """``address``: as in :func:`connector`, or what connects. ``fingerprint``: of the model that it must
        have; empty: any. Raises ConfigError."""
        super().__init__(name)
        self._connect = connector(address) if isinstance(address, str) else address
        self._token = token
        self._fingerprint = fingerprint
        #: launches that were refused, by either side, by reason
        self.refused: Counter[str] = Counter()
        #: attempts that it has brought to an end since it was launched
        self.completed = 0
        #: rows of attempts that are not wanted any more
        self.late_rows = 0
        #: as far as the dispatcher knows from what it has sent
        self.remembered = RememberedPages()
        self._events: ReplicaEvents | None = None
        self._link: _Link | None = None
        self._welcome: Welcome | None = None
        self._stats: EngineStats | None = None
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
    def _known(self) -> Welcome:
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
                link.connection.send(Hello(self._token, self._fingerprint))
                welcome = await link.welcome
        except (OSError, TimeoutError, FrameError) as error:
            link.connection.abort()
            raise EngineError(f"the replica {self.name} does not answer: {error!r}") from error
        except ConfigError as error:
            link.connection.abort()
            self._refuse(str(error))
            raise
        except BaseException:
            link.connection.abort()
            raise
        if self._fingerprint and welcome.info.fingerprint != self._fingerprint:
            link.connection.abort()
            found = welcome.info.fingerprint
            why = f"the replica {self.name} has the model {found}, and not {self._fingerprint}"
            self._refuse(why)
            raise ConfigError(why)
        self._link, self._welcome, self._stats = link, welcome, welcome.stats
        self._adapters = list(welcome.adapters)
        link.begin()

    def begin_launch(self) -> None:
        """It is about to be there, and nothing is known of it."""
        self.state, self.completed, self._stats = ReplicaState.STARTING, 0, None
        self.remembered.clear()

    def _refuse(self, why: str) -> None:
        self.refused[why] += 1
        log = _log.warning if self.refused[why] == 1 else _log.debug
        log("the replica %s is not used: %s", self.name, why)

    async def start(self, events: ReplicaEvents) -> None:
        if self._link is None or self._link.connection.closed:
            raise EngineError(f"the replica {self.name} is not connected")
        self._events = events
        self.state, self.cause = ReplicaState.READY, None

    async def aclose(self) -> None:
        await self._disconnect()
        if self.state is not ReplicaState.LOST:
            self.state = ReplicaState.CLOSED

    def outlive_loop(self) -> None:
        if self._link is not None:
            self._link.connection.outlive_loop()
        self._link = self._events = None

    async def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.closing = True
            link.connection.abort()
            await asyncio.wait([link.connection.gone])

    # -- attempts ---------------------------------------------------------------------------------

    def submit(
        self,
        attempt: Attempt,
        checkpoint: StreamCheckpoint | None,
        waiting: float | None,
        running: float | None,
    ) -> None:
        link, record = self._link, attempt.record
        if link is None or link.connection.closed:
            raise EngineFailed(f"the replica {self.name} is not connected")
        sent = _Sent(attempt, _read(record))
        order = Submit.of(
            attempt.number,
            record.prompt_ids,
            attempt.params,
            options_of(record, waiting, running),
            checkpoint,
            sent.read,
        )
        try:
            link.connection.send(order)
        except FrameError as error:
            raise InvalidRequest("prompt", f"the request cannot be sent to a replica: {error}") from error
        attempt.handle = sent
        link.sent[attempt.number] = sent

    def abort(self, attempt: Attempt) -> None:
        attempt.handle = None
        link = self._link
        if link is not None and link.sent.pop(attempt.number, None) is not None:
            link.connection.send(Abort(attempt.number))

    def begun(self, attempt: Attempt) -> bool:
        return attempt.handle is not None and attempt.handle.admitted_at is not None

    def caught_up(self, attempt: Attempt) -> None:
        if self._link is not None and attempt.handle is not None:
            self._link.tell_read(attempt.handle)

    def cached(self, token_ids: Sequence[int], record: Record, pages: Sequence[int]) -> int:
        return self.remembered.leading(pages) * PAGE

    def remember(self, pages: Sequence[int]) -> None:
        if self._stats is not None and self._known.caches:
            self.remembered.add(pages, self._stats.pages_total * (self.info.page_size or PAGE) // PAGE)

    # -- as what a link reports to ----------------------------------------------------------------

    def moved(self, rows: list[tuple[Attempt, Rows]]) -> None:
        if self._events is not None:
            self._events.moved(rows)

    def measured(self, stats: EngineStats) -> None:
        self.note_version(stats.weight_version)
        self._stats = stats

    def leaving(self) -> None:
        if self._events is not None:
            self._events.leaving(self)

    def lost(self, cause: BaseException) -> None:
        if self._events is not None:
            self._events.lost(self, cause)

    no_updates = "engines in other processes are given weights there"

    @property
    def weight_version(self) -> int:
        """As far as it has told."""
        return 0 if self._stats is None else self._stats.weight_version

    def note_version(self, version: int) -> None:
        if self._stats is not None and version > self._stats.weight_version:
            self._stats = dataclasses.replace(self._stats, weight_version=version)
            if self._events is not None:
                self._events.adapted()

    # -- the engine -------------------------------------------------------------------------------

    def stats(self) -> EngineStats | None:
        """As of a quarter of a second ago, or as of when it was lost."""
        return self._stats

    def adapters(self) -> list[AdapterInfo]:
        return self._adapters

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """The path is one there."""
        adapters = await self._adapt(name, path)
        for each in adapters:
            if each.name == name:
                return each
        raise EngineError(f"the replica {self.name} has loaded the adapter {name!r}, and does not name it")

    async def unload_adapter(self, name: str) -> None:
        await self._adapt(name, None)

    async def _adapt(self, name: str, path: str | None) -> Sequence[AdapterInfo]:
        link = self._link
        if link is None or link.connection.closed:
            raise EngineFailed(f"the replica {self.name} is not connected")
        answer = await link.adapt(name, path)
        if answer.error is not None:
            raise answer.error.error()
        return answer.adapters

    def adapted(self, adapters: Sequence[AdapterInfo]) -> None:
        """These are there now."""
        self._adapters = list(adapters)
        if self._events is not None:
            self._events.adapted()

    async def pause(self) -> None:
        link = self._link
        if link is not None and not link.connection.closed:
            link.connection.send(Pause())
            paused = link.connection.gone.get_loop().create_future()
            link.pausing.append(paused)
            await paused

    def resume(self) -> None:
        if self._link is not None:
            self._link.connection.send(Resume())

    def flush_cache(self) -> int:
        """The pages that can be freed, as of its last statistics."""
        if self._link is None or self._stats is None:
            return 0
        self._link.connection.send(Flush())
        self.remembered.clear()
        return self._stats.pages_evictable


class _Link:
    """One connection to a replica: its end here."""

    def __init__(self, replica: SocketReplica) -> None:
        self._replica = replica
        self._loop = asyncio.get_running_loop()
        self._clock = clock_of(self._loop)
        self.connection = Connection(self, _FIRST)
        #: what the replica is
        self.welcome: asyncio.Future[Welcome] = self._loop.create_future()
        #: attempts by number
        self.sent: dict[int, _Sent] = {}
        #: what waits until no step is in flight
        self.pausing: list[asyncio.Future[None]] = []
        #: what waits for adapters, by number
        self._adapting: dict[int, asyncio.Future[Adapted]] = {}
        self._adapts = 0
        #: this end closes it
        self.closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._misses = 0

    def begin(self) -> None:
        """From now on, the replica has to be heard."""
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _beat(self) -> None:
        # It counts looks and not seconds: when this loop has stood still, nothing was read meanwhile.
        self._timer = self._loop.call_later(BEAT, self._beat)
        connection = self.connection
        self._misses = 0 if connection.heard else self._misses + 1
        connection.heard = False
        if self._misses >= MISSES:
            connection.abort(EngineFailed(f"no frame for {MISSES * BEAT:g} s"))
        else:
            connection.send(Ping())

    async def adapt(self, name: str, path: str | None) -> Adapted:
        """Have an adapter loaded or unloaded; cancelled, it is left, and what came of it is known then."""
        self._adapts += 1
        number = self._adapts
        waiting: asyncio.Future[Adapted] = self._loop.create_future()
        self._adapting[number] = waiting
        try:
            at = None if path is None else os.fsencode(path)
            self.connection.send(Adapt(number, name, at))
            return await finish(waiting, lambda: self.connection.send(Adapt(number)))
        finally:
            del self._adapting[number]

    # -- as End -----------------------------------------------------------------------------------

    def connected(self) -> None:
        """As in End."""
        self.connection.trust(_FIRST)

    def received(self, message: Welcome | Refused | Answers) -> None:
        """As in End."""
        match message:
            case StepRows():
                self._rows(unpacked(message.rows, self._clock(), self._replica.info.vocab_size))
            case Stats():
                self._replica.measured(message.stats)
            case Paused():
                if self.pausing:
                    _set(self.pausing.pop(0))
            case Adapted():
                self._replica.adapted(message.adapters)
                waiting = self._adapting.get(message.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Leaving():
                self._replica.leaving()
            case Lost():
                self.connection.abort(EngineFailed(message.reason))
            case Welcome():
                self.connection.trust(_ANSWERS)
                if not self.welcome.done():
                    self.welcome.set_result(message)
            case Refused():
                if not self.welcome.done():
                    self.welcome.set_exception(ConfigError(f"it refuses: {message.reason}"))

    def fill(self) -> bool:
        """As in End."""
        return False

    def ended(self, cause: BaseException | None) -> None:
        """As in End."""
        if self._timer is not None:
            self._timer.cancel()
        for paused in self.pausing:
            _set(paused)
        for waiting in self._adapting.values():
            if not waiting.done():
                waiting.set_exception(EngineFailed("the connection of the replica was closed"))
        if not self.welcome.done():
            self.welcome.set_exception(cause or EngineError("it has closed the connection"))
            self.welcome.exception()  # whoever waited may have left
        elif not self.closing:
            self._replica.lost(cause or EngineFailed("its connection was closed"))

    # -- rows -------------------------------------------------------------------------------------

    def _rows(self, rows: list[tuple[int, Rows]]) -> None:
        found: list[tuple[Attempt, Rows]] = []
        lagging: list[_Sent] = []
        for number, row in rows:
            sent = self.sent.get(number)
            if sent is None:
                self._replica.late_rows += 1
                continue
            attempt = sent.attempt
            if (
                row.admitted_at is not None
                or row.prompt_logprobs
                or row.draft
                or row.weight_version is not None
            ):
                self._complete(sent, row)
            found.append((attempt, row))
            if row.ending is not None:
                del self.sent[number]
                attempt.handle = None
                self._replica.completed += row.ending.error is None
            elif attempt.record.options.max_lag is not None:
                lagging.append(sent)
        if found:
            self._replica.moved(found)
        for sent in lagging:
            self.tell_read(sent)

    def _complete(self, sent: _Sent, row: Rows) -> None:
        """What is not in columns. Logprobs of the prompt come in parts."""
        if row.admitted_at is not None:
            sent.admitted_at = row.admitted_at
            if sent.attempt.params.prompt_logprobs is None:  # else nothing was looked for
                self._replica.remembered.found(sent.attempt.pages, -(-row.cached_tokens // PAGE))
        if row.weight_version is not None and not row.first:
            sent.prompt_logprobs = []  # nothing was output, and others compute them
        sent.prompt_logprobs += row.prompt_logprobs
        row.prompt_logprobs = sent.prompt_logprobs
        if row.draft is not None:
            row.draft = _newest(row.draft(), sent.attempt.record)

    # -- what consumers have read -----------------------------------------------------------------

    def tell_read(self, sent: _Sent) -> None:
        """Tell the replica how far the consumer has read: at half of what it may leave unread, or later when
        it has read more. The replica parks a request by what it was told."""
        attempt, record = sent.attempt, sent.attempt.record
        most = record.options.max_lag
        if attempt.ended or most is None:
            return
        read = _read(record)
        if read - sent.read > most // 2:
            sent.read = read
            self.connection.send(Read(attempt.number, read))
        elif len(record.output_ids) - sent.read > most // 2:
            record.parked_for = _READER  # with what it reads next


def _read(record: Record) -> int:
    """Tokens of the output that its consumer has read, or waits for."""
    cell = record.consumer
    assert isinstance(cell, StreamCell)
    return len(record.token_times) if cell.reading else cell.taken_ids


def _newest(draft: Draft | None, record: Request) -> Callable[[], Draft | None]:
    """A draft is behind the output, until that goes on."""
    return lambda: draft if draft is not None and draft.start == len(record.output_ids) else None


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
