"""Agent: serves an engine to a dispatcher in another process.

It listens, and one dispatcher at a time has it: the first one that shows the token and wants this model. What
steps bring is not copied for the wire: an agent notes which streams have moved, and when the socket takes
more, it takes what is new in each of them. So while a dispatcher does not read, nothing piles up but the
outputs themselves, and what it gets then is one frame.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from aioinfer.cells import Outlet
from aioinfer.errors import ConfigError, EngineClosed, EngineError, EngineFailed, RequestError
from aioinfer.loop.clock import clock_of
from aioinfer.observe.observers import Observer
from aioinfer.parallel import messages
from aioinfer.parallel.connection import Connection
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.holds import Holds
from aioinfer.parallel.reading import Reading
from aioinfer.parallel.rows import Ending, Rows
from aioinfer.parallel.sent_errors import sendable
from aioinfer.parallel.shared_pages import SharedPages
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.engine import Engine

__all__ = ["Agent"]

_log = logging.getLogger("aioinfer")

#: seconds in which a connection must have shown its token
_PATIENCE = 5.0
#: seconds for the last frames of a connection that is closed
_FAREWELL = 1.0
#: tokens, and characters of their text, from which on rows go into another frame
_MOST = 1 << 18

_HELLO, _ORDERS = messages.Decoder(messages.Hello), messages.Decoder(messages.Orders)


class Agent:
    """Serves one engine to one dispatcher. It belongs to the loop of the engine, which must have started."""

    def __init__(self, engine: Engine, *, token: str = "") -> None:
        """``token``: what a dispatcher must show; empty: nothing, for sockets that only it can reach."""
        self.engine = engine
        self.token = token
        self.session: _Session | None = None
        self.leaving = False
        self.life = secrets.token_hex(8)
        self._drained = asyncio.Event()
        #: connections that were refused, by reason
        self.refused: Counter[str] = Counter()
        self._sessions: set[_Session] = set()
        #: done when the engine is lost
        self.lost: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        engine.observe(_Watch(self))

    def connect(self) -> Connection:
        """The protocol of a new connection, for ``loop.create_server`` and ``create_unix_server``."""
        session = _Session(self)
        self._sessions.add(session)
        return session.connection

    async def drain(self) -> None:
        """Tell the dispatcher to have its streams go on elsewhere, and wait until nothing is computed: what
        can go on nowhere else is finished here."""
        self.leaving = True
        if self.session is not None:
            self.session.connection.send(messages.Leaving())
        self.emptied()
        await self._drained.wait()

    def emptied(self) -> None:
        """Note that a stream has ended, or all have."""
        if self.leaving and (self.session is None or not self.session.open):
            self._drained.set()

    async def aclose(self) -> None:
        """End the connections and what is computed for them. The engine goes on. Idempotent."""
        sessions = list(self._sessions)
        for session in sessions:
            session.finish()
        if sessions:
            await asyncio.wait([session.connection.gone for session in sessions], timeout=_FAREWELL)
        for session in sessions:
            session.connection.abort()

    def failed(self, cause: BaseException) -> None:
        """Report that the engine is lost."""
        if not self.lost.done():
            self.lost.set_result(cause)
        if self.session is not None:
            self.session.lost(cause)

    def refuse(self, reason: str, what: str) -> None:
        """Count a connection, and log the first one that is refused for this reason."""
        self.refused[reason] += 1
        log = _log.warning if self.refused[reason] == 1 else _log.debug
        log("a connection to this replica is refused: %s", what)

    def gone(self, session: _Session) -> None:
        """Forget a session whose connection is closed."""
        self._sessions.discard(session)
        if self.session is session:
            self.session = None
            self.emptied()

    def why_not(self, hello: messages.Hello) -> tuple[str, str] | None:
        """The reason to refuse a dispatcher, in a word and in a sentence."""
        shown, token = (each.encode(errors="surrogatepass") for each in (hello.token, self.token))
        if not hmac.compare_digest(shown, token):
            return "token", "the token is not that of this replica"
        if hello.protocol != messages.PROTOCOL:
            return "protocol", f"it speaks protocol {hello.protocol}, and this replica {messages.PROTOCOL}"
        if not self.engine.ready or self.leaving:
            return "closing", f"the engine of this replica is {self.engine.state.value}"
        if self.session is not None:
            return "taken", "another dispatcher has this replica"
        return None


class _Watch(Observer):
    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def changed(self) -> None:
        if self._agent.session is not None:
            self._agent.session.changed()

    def failed(self, cause: BaseException) -> None:
        self._agent.failed(cause)


class _Reading(Reading):
    """Reads the stream of an attempt, which the dispatcher knows by its number."""

    __slots__ = ("ended", "number")

    def __init__(self, session: _Session, number: int, stream: Stream, resumed: int) -> None:
        super().__init__(session, stream, resumed)
        self.number = number
        self.ended = False

    @property
    def news(self) -> bool:
        return self.ended or super().news or (self.output.admitted_at is not None and not self._admitted)

    def take_for_message(self, now: float) -> Rows:
        """As :meth:`take`, with an age in place of times, since two processes need not have one clock."""
        rows = self.take(ended=self.ended)
        rows.times = ()
        if rows.admitted_at is not None:
            rows.admitted_at = max(0.0, now - rows.admitted_at)
        return rows


class _Session:
    """One connection, of a dispatcher once it has shown the token. It is the lane of its readings."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._clock = clock_of(self._loop)
        self.connection = Connection(self, _HELLO)
        self._trusted = self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        #: by attempt, what is computed
        self.open: dict[int, _Reading] = {}
        #: what may have news
        self._moved: dict[_Reading, None] = {}
        #: attempts that were not queued
        self._unqueued: list[tuple[int, Rows]] = []
        #: loads and unloads of adapters, by the dispatcher's numbers
        self._adapting: dict[int, asyncio.Task[object]] = {}
        #: where it leaves pages for other replicas
        self._pages: SharedPages | None = None
        self._holds = Holds(agent.engine, self.connection.send)
        #: why its engine is lost, and whether that was sent
        self._cause: BaseException | None = None
        self._told = False

    # -- as End -----------------------------------------------------------------------------------

    def connected(self) -> None:
        self._timer = self._loop.call_later(_PATIENCE, self.connection.abort)

    def received(self, message: messages.Hello | messages.Orders) -> None:
        match message:
            case messages.Hello():
                if not self._refused:
                    self._hello(message)
            case messages.Submit():
                self._submit(message)
            case messages.Abort():
                self._abort(message.number)
            case messages.Read():
                self._read(message.number, message.tokens)
            case messages.Pause():
                self._pause()
            case messages.Resume():
                self._agent.engine.resume()
            case messages.Flush():
                if self._agent.engine.ready:
                    self._agent.engine.flush_cache()
            case messages.Adapt():
                self._adapt(message)
            case messages.Hold():
                self._holds.hold(message)
            case messages.Use():
                self._holds.use(message.number)
            case messages.Release():
                self._holds.release(message.number)
            case messages.Share():
                self._share(message)
            case messages.Store() | messages.Fetch() | messages.Keep():
                self._exchange(message)
            case messages.Ping():
                pass

    def beat(self) -> messages.Stats:
        """As in End."""
        self._holds.report()
        return messages.Stats(self._agent.engine.stats())

    def fill(self) -> bool:
        """As in End: one frame of what is new."""
        rows, self._unqueued = self._unqueued, []
        size = 0
        while self._moved and size < _MOST:
            reading = next(iter(self._moved))
            if reading.number in self.open and reading.news:
                found = reading.take_for_message(self._clock())
                rows.append((reading.number, found))
                size += len(found.ids) + len(found.text) + 20 * len(found.prompt_logprobs)
                if found.ending is not None:
                    del self.open[reading.number]
                elif reading.news:
                    continue  # of other weights
            del self._moved[reading]
        if rows:
            self._send_rows(rows)
            self._agent.emptied()
        if self._cause is not None and not (self._moved or self._told):
            self._told = True
            self.connection.send(self.beat())
            self.connection.send(messages.Lost.of(self._cause))
            self._loop.call_soon(self.connection.finish)
        return bool(self._moved)

    def finish(self) -> None:
        """Send the last statistics, and close the connection."""
        if self._trusted:
            self.connection.send(self.beat())
        self.connection.finish()

    def ended(self, cause: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not (self._trusted or self._refused):
            reason = "silent" if cause is None else "frame"
            self._agent.refuse(reason, "it has shown no token" if cause is None else str(cause))
        elif cause is not None and self._trusted:
            _log.warning("the connection of a dispatcher has ended: %s", cause)
        readings, self.open = list(self.open.values()), {}
        self._moved.clear()
        for reading in readings:
            reading.stream.leave()
        for adapting in self._adapting.values():
            adapting.cancel()
        self._holds.close()
        if self._pages is not None:
            self._pages.close()
        if self._trusted and self._agent.engine.ready:
            self._agent.engine.resume()
        self._agent.gone(self)

    # -- handshake --------------------------------------------------------------------------------

    def _hello(self, hello: messages.Hello) -> None:
        agent = self._agent
        why = agent.why_not(hello)
        if why is not None:
            agent.refuse(*why)
            self._refused = True
            self.connection.send(messages.Refused(sendable(why[1])))
            self._loop.call_soon(self.connection.finish)
            return
        engine = agent.engine
        settled = engine.info.settle(engine.config)
        welcome = messages.Welcome(
            engine.info,
            settled.running_requests,
            settled.step_tokens,
            engine.stats(),
            engine.config.prefix_cache,
            tuple(engine.adapters()),
            agent.life,
        )
        self._trusted = True
        agent.session = self
        self.connection.trust(_ORDERS)
        self.connection.send(welcome)
        assert self._timer is not None
        self._timer.cancel()
        self.connection.begin_beats()

    # -- attempts ---------------------------------------------------------------------------------

    def _submit(self, order: messages.Submit) -> None:
        if order.number in self.open:
            raise FrameError(f"attempt {order.number} is there already")
        try:
            stream = self._agent.engine.queue(*(asked := order.asked()))
        except (EngineFailed, EngineClosed) as error:
            self.lost(error)
            return
        except (RequestError, EngineError) as error:
            self._unqueued.append((order.number, Rows(0, 0, ending=Ending("abort", error=error))))
            self.connection.write_soon()
            return
        resumed = 0 if asked[2] is None else len(asked[2].token_ids)
        reading = _Reading(self, order.number, stream, resumed)
        self.open[order.number] = reading
        cell = stream.cell
        # Its consumer is elsewhere, and tells how far it has read.
        cell.taken_ids, cell.blocked = order.read, cell.max_lag is not None
        reading.begin(self._finished)

    def _abort(self, number: int) -> None:
        reading = self.open.pop(number, None)  # else it has ended meanwhile
        if reading is not None:
            reading.stream.leave()
            self._agent.emptied()

    def _read(self, number: int, tokens: int) -> None:
        reading = self.open.get(number)
        if reading is None or reading.ended:
            return
        cell = reading.stream.cell
        cell.taken_ids = max(cell.taken_ids, min(tokens, len(reading.output.token_times)))
        if not cell.lags:
            reading.stream.caught_up()

    def _send_rows(self, rows: list[tuple[int, Rows]]) -> None:
        """Send rows in one frame, or in several if that is too large."""
        try:
            self.connection.send(messages.StepRows(rows))
        except FrameError as error:
            if len(rows) == 1:
                self._drop(rows[0][0], error)
                return
            half = len(rows) // 2
            self._send_rows(rows[:half])
            self._send_rows(rows[half:])

    def _drop(self, number: int, error: FrameError) -> None:
        """End a request whose rows cannot be sent."""
        self._abort(number)
        ending = Ending("abort", error=EngineError(f"what a step brought cannot be sent: {error}"))
        self.connection.send(messages.StepRows([(number, Rows(0, 0, ending=ending))]))

    # -- as the lane of its readings ---------------------------------------------------------------

    def moved(self, outlets: Sequence[Outlet]) -> None:
        for reading in cast("Sequence[_Reading]", outlets):
            self._moved[reading] = None
        if not self.connection.full:
            self.connection.write_soon()

    def _finished(self, reading: _Reading) -> None:
        error = reading.output.error
        if isinstance(error, (EngineFailed, EngineClosed)):
            self.lost(error.__cause__ or error)
        else:
            reading.ended = True
            self.moved((reading,))

    def lost(self, cause: BaseException) -> None:
        """Report that the engine is lost: its streams have not ended, and may go on elsewhere."""
        if self._cause is None:
            self._cause = cause
            self.connection.write_soon()

    # -- the engine -------------------------------------------------------------------------------

    def changed(self) -> None:
        """Report other weights or adapters, before any output of these."""
        engine, connection = self._agent.engine, self.connection
        if engine.ready and not connection.closed:
            connection.send(messages.Stats(engine.stats()))
            connection.send(messages.Adapted(0, tuple(engine.adapters())))

    def _adapt(self, order: messages.Adapt) -> None:
        if not order.name:
            if (leaving := self._adapting.get(order.number)) is not None:
                leaving.cancel()
            return
        engine, name, path = self._agent.engine, order.name, order.path
        adapting = (
            engine.unload_adapter(name) if path is None else engine.load_adapter(name, os.fsdecode(path))
        )
        task: asyncio.Task[object] = self._loop.create_task(adapting, name="aioinfer-adapter")
        self._adapting[order.number] = task
        task.add_done_callback(functools.partial(self._adapted, order.number))

    def _adapted(self, number: int, task: asyncio.Task[object]) -> None:
        del self._adapting[number]
        error: BaseException | None = EngineError("the load was cancelled")
        if not task.cancelled():
            error = task.exception()
        if not self.connection.closed:
            adapters = tuple(self._agent.engine.adapters())
            self.connection.send(messages.Adapted(number, adapters, error))

    def _share(self, order: messages.Share) -> None:
        why, before = "", self._pages
        try:
            self._pages = SharedPages(self._agent.engine, order, self.connection.send)
        except (ConfigError, EngineError) as error:
            why = sendable(str(error))
        else:
            if before is not None:
                before.close()
        self.connection.send(messages.Shared(order.number, why))

    def _exchange(self, order: messages.Store | messages.Fetch | messages.Keep) -> None:
        if self._pages is None:
            raise FrameError("an order about pages, of which none were to be kept")
        match order:
            case messages.Store():
                self._pages.store(order)
            case messages.Fetch():
                self._pages.fetch(order)
            case messages.Keep():
                self._pages.keep(order)

    def _pause(self) -> None:
        task = self._loop.create_task(self._agent.engine.pause(), name="aioinfer-pausing")
        task.add_done_callback(self._paused)

    def _paused(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            return  # the engine is lost or closed, which is told otherwise
        self.connection.send(messages.Paused())
