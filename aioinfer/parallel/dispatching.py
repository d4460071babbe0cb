"""Dispatching: a started dispatcher. It keeps the record of every stream and sends it to a replica.

::

    generate() ── queue ── pump ──► attempt ──► replica          the record of a stream outlives its attempts
                    ▲                  │
                    └── lost, moved ───┴── rows ──► record ──► stream

Queue and pump are in :mod:`~aioinfer.parallel.sending`. Requests wait here and not in the replicas: one is
sent when a replica has a slot and little to prefill. So order, priorities, deadlines and limits hold for all
replicas together, a replica that joins has work at once, and one that is lost takes little with it. There is
no task per stream and no timer but deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.cache.radix import token_key
from aioinfer.cells import StreamCell, tell_lanes
from aioinfer.errors import (
    ConfigError,
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    Rejected,
    RequestError,
    TimedOut,
    shown,
)
from aioinfer.loop.observing import measure
from aioinfer.loop.options import Prepared
from aioinfer.loop.preparing import Preparing
from aioinfer.loop.service import EngineState
from aioinfer.parallel.handover import Handovers, carry
from aioinfer.parallel.holds import Homed
from aioinfer.parallel.local import LocalReplica
from aioinfer.parallel.placing import has_adapter, page_hashes
from aioinfer.parallel.record import Record, namespace_of
from aioinfer.parallel.replica import (
    Attempt,
    Diverged,
    Replica,
    ReplicaState,
    Unwanted,
    close_all,
)
from aioinfer.parallel.rows import Ending, Rows
from aioinfer.parallel.sending import OnLoss, Sending
from aioinfer.parallel.weights import ReplicaWeights
from aioinfer.params import SamplingParams
from aioinfer.request import Output
from aioinfer.resuming.record import StreamCheckpoint

if TYPE_CHECKING:
    from aioinfer.loop.holding import Kept, Prefix
    from aioinfer.observe.metrics.measuring import Measuring
    from aioinfer.observe.stats import EngineStats
    from aioinfer.tiers.store import PageStore

__all__ = ["Dispatching"]

_log = logging.getLogger("aioinfer")

#: losses at one and the same token, or before the first, after which the request itself is blamed
_MOST_LOSSES = 2


class Dispatching(Sending):
    """Belongs to the loop on which it is made. Streams know it as their owner, replicas as what they report
    to, and the dispatcher as what takes requests."""

    kind = "dispatcher"
    replays = False

    def __init__(self, *arguments: Any, on_loss: OnLoss) -> None:
        """As in :class:`Sending`."""
        super().__init__(*arguments, on_loss=on_loss)
        #: counts of streams that went on elsewhere, and of attempts that brought something else
        self.resumed, self.diverged = 0, 0
        #: seconds from a loss to the next token, of streams that have that, in all
        self.resume_seconds = 0.0
        #: finds what is wrong with a request before an engine has it
        self.preparing = Preparing(self.config, self.info, self.tokenizer, drafts=False)
        self._seeds = random.Random(self.config.seed)
        self._keys, self._arrivals = 0, 0
        self.handovers = Handovers(self._enqueue, self.placing.successor)
        self.weights = ReplicaWeights(self, self.placing, self.adapted)
        #: has replicas leave pages for each other
        self.share: Callable[[], Awaitable[None]] | None = None
        self.sharing = asyncio.Lock()
        #: told of each replica that is lost
        self.when_lost: Callable[[Replica], None] | None = None
        #: set while something waits for the ends of a replica's requests
        self._emptied: asyncio.Future[None] | None = None

    # -- requests -------------------------------------------------------------------------------

    def _opened(self, cell: StreamCell, checkpoint: StreamCheckpoint | None) -> Record:
        request = cell.output.request
        if request.budget is not None:
            raise InvalidRequest("budget", "is counted in one engine: a dispatcher has none")
        self.adapters.check(request.adapter, checkpoint)
        if request.params.logits_processors and not all(
            isinstance(each, LocalReplica) for each in self.placing.replicas
        ):
            raise InvalidRequest("logits_processors", "cannot be called by replicas in other processes")
        return Record(cell)

    def _complete(
        self, ids: Sequence[int], params: SamplingParams, checkpoint: StreamCheckpoint | None
    ) -> Prepared:
        return self.preparing.complete(ids, params, self.checks.stop_ids(params))

    def _accept(self, record: Record, prepared: Prepared, checkpoint: StreamCheckpoint | None) -> None:
        request, ids = record.request, prepared.prompt_ids
        self.checks.check_length(request.params, len(ids), request.pooling)
        self._keys += 1
        self._arrivals += not request.queue_behind
        place = None if prepared.resumption is None else prepared.resumption.queued
        record.place = (*(place or (self._arrivals + request.queue_behind,)), self._keys)
        seed = request.params.seed if checkpoint is None else checkpoint.seed
        if seed is None:
            seed = self._seeds.getrandbits(63)
        record.output.images = prepared.images
        record.accept(ids, seed, self.info, text=self.tokenizer is not None)
        if checkpoint is not None:
            record.begin(checkpoint)
        self._enqueue(record)

    def _share(self, cell: StreamCell) -> None:
        """None: the replica that has the prefix shares it when its prompt is computed, or when it ends."""

    def _place(self, record: Record) -> tuple[int, ...]:
        return record.place[:2]

    def _swap(self, record: Record, output: Output) -> None:
        self._abort(record, None)
        self.queue.remove(record)
        self.handovers.drop(record)
        record.cell.cancel_timer()
        record.rewritten(output)
        self._limit(record)

    @property
    def queued(self) -> tuple[int, int]:
        return len(self.queue), self.queue.tokens

    @property
    def room(self) -> tuple[int, int]:
        # How much memory is left in replicas, they know.
        return self.placing.free_slots, 1 << 62

    def caught_up(self, cell: StreamCell) -> None:
        cell.parked = False
        if cell in self.open:
            self._caught_up(self.open[cell])

    def _caught_up(self, record: Record) -> None:
        attempt = self.attempts.get(record)
        if attempt is not None:
            attempt.replica.caught_up(attempt)

    # -- as ReplicaEvents -----------------------------------------------------------------------

    def moved(self, rows: Sequence[tuple[Attempt, Rows]]) -> None:
        told: list[StreamCell] = []
        now = self.clock()
        for attempt, brought in rows:
            if attempt.ended:
                continue  # with its replica, over rows before
            try:
                moved = self._take(attempt, brought, now)
                if brought.ending is not None:
                    self._finish(attempt, brought.ending)
                    continue
                if moved and not (told and told[-1] is attempt.record.cell):
                    told.append(attempt.record.cell)
                if attempt.replica.role == "prefill":
                    self._hand_over(attempt)
            except Unwanted:
                self._leave(attempt, abort=True)
                self._again(attempt.record)
            except Diverged as error:
                _log.error("%s on %s: %s", attempt.record, attempt.replica.name, error)
                self.diverged += 1
                self._lose(attempt, error)
            except ValueError as error:
                self.lost(attempt.replica, error)
        for cell in tell_lanes(told):
            cell.notify()
            if cell.max_lag is not None and cell in self.open:
                self._parks(self.open[cell], cell)

    def _parks(self, record: Record, cell: StreamCell) -> None:
        """The replica parks what its consumer does not read, as far as it knows; here is how far that is."""
        if cell.lags:
            cell.parked = True
        else:
            self._caught_up(record)

    def _take(self, attempt: Attempt, rows: Rows, now: float) -> bool:
        record = attempt.record
        if rows.admitted_at is not None:
            if record.output.admitted_at is None:
                record.output.admitted_at = rows.admitted_at
            if not attempt.resumes:
                record.output.cached_tokens = rows.cached_tokens
            self.placing.admitted(attempt, rows.cached_tokens)
        if rows.adapter_fingerprint and not record.output.token_ids:
            record.output.adapter_fingerprint = rows.adapter_fingerprint
        if rows.weight_version is not None:
            attempt.replica.note_version(rows.weight_version)
        more = attempt.bring(rows, now)
        if rows.ids and attempt.uncached:
            attempt.replica.load.admitted(attempt, 0)  # its prompt is computed
            self._pump_soon()
        if more and record.lost_at is not None:
            self.resume_seconds += self.clock() - record.lost_at
            record.lost_at = None
        if rows.draft is not None:
            record.output.make_draft = rows.draft
            record.output.draft_version += 1
            return True
        return more

    def _hand_over(self, attempt: Attempt) -> None:
        """Have another replica go on with a stream whose prompt is computed, once one has a slot for it."""
        record = attempt.record
        prompt = len(record.output.prompt_ids)
        blocks = self.info.block_size is not None
        begun = (self.info.block_start(record.known, prompt) if blocks else record.known) > prompt
        if begun and self.placing.successor(record, len(self.handovers)) is not None:
            self._leave(attempt, abort=True)
            self._limit(record)
            record.handed_over = True
            self.handovers.begin(record, attempt.replica)

    def _finish(self, attempt: Attempt, ending: Ending) -> None:
        record, error = attempt.record, ending.error
        self._leave(attempt)
        full = isinstance(error, Rejected) and error.full and self.placing.full(attempt.replica)
        # What it asks for was replaced or unloaded on its way.
        if full or (isinstance(error, InvalidRequest) and not has_adapter(attempt.replica, record)):
            self._again(record)
            return
        if isinstance(error, TimedOut):
            # The replica knows the time that was left.
            seconds = getattr(record.request, f"{error.phase}_timeout")
            ending.error = error if seconds is None else TimedOut(error.phase, seconds)
        record.finish(ending, self.clock())
        self._ended(record)

    def leaving(self, replica: Replica) -> None:
        self.drain(replica)

    def lost(self, replica: Replica, cause: BaseException) -> None:
        if replica.state in (ReplicaState.LOST, ReplicaState.CLOSED):
            return
        _log.error("the replica %s is lost with %d requests: %s", replica.name, replica.load.requests, cause)
        replica.state, replica.cause = ReplicaState.LOST, cause
        for attempt in list(replica.load.attempts.values()):
            self._lose(attempt, cause)
        self.queue.take_back()
        self._check_left()
        self._pump_soon()
        if self.when_lost is not None:
            self.when_lost(replica)

    def _lose(self, attempt: Attempt, cause: BaseException) -> None:
        """Give up a lost attempt: its stream goes on elsewhere, or fails. A request can end its replica
        before it has a row, while its grammar is built, for example."""
        record = attempt.record
        self._leave(attempt, abort=True)
        if len(record.output.token_ids) > record.lost_length:
            record.losses.clear()
        record.losses.append(cause)
        record.lost_length = len(record.output.token_ids)
        if self.on_loss == "fail":
            self.end(record, self._for_good(record, "its replica is lost", cause))
        elif len(record.losses) >= _MOST_LOSSES:
            self.end(record, self._for_good(record, f"{len(record.losses)} replicas were lost with it"))
        else:
            self._again(record)

    def _again(self, record: Record) -> None:
        """Queue a stream for another attempt, after a loss or a move."""
        record.stored, record.near, record.handed_over = 0, "", False
        if record.lost_at is None and record.output.admitted_at is not None:
            record.lost_at = self.clock()
        self.resumed += record.output.admitted_at is not None
        self._limit(record)
        self._enqueue(record)

    def _limit(self, record: Record) -> None:
        """Keep its deadline, which no replica does at the moment."""
        left = record.time_left(self.clock())
        if record.output.admitted_at is None:
            self._set_timer(record, "waiting", left.waiting)
        else:
            self._set_timer(record, "running", left.running)

    def _leave(self, attempt: Attempt, *, abort: bool = False) -> None:
        attempt.ended = True
        if self.attempts.get(attempt.record) is attempt:
            del self.attempts[attempt.record]
        self.placing.ended(attempt)
        self._pump_soon()
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        if abort:
            attempt.replica.abort(attempt)

    # -- replicas -------------------------------------------------------------------------------

    def drain(self, replica: Replica) -> None:
        """Move the streams of a replica to others, and send it no new ones. It finishes those that can go on
        nowhere else."""
        if replica.state is not ReplicaState.READY:
            return
        replica.state = ReplicaState.DRAINING
        for attempt in list(replica.load.attempts.values()):
            record = attempt.record
            if self.placing.computes(record, self._wanted(record), sent=True):
                self._leave(attempt, abort=True)
                self._again(record)

    async def emptied(self, replica: Replica) -> None:
        """Wait until nothing is computed on a replica that is draining, or until it is lost."""
        while replica.load.requests and replica.state is not ReplicaState.LOST:
            if self._emptied is None or self._emptied.done():
                self._emptied = self.loop.create_future()
            await asyncio.shield(self._emptied)

    def left(self) -> None:
        """Note that a replica was removed."""
        self.queue.take_back()
        self._check_left()
        self._pump_soon()

    def joined(self) -> None:
        """Note that a replica is ready."""
        if self.state is EngineState.FAILED:
            self.state = EngineState.RUNNING
        self.adapted()

    def adapted(self) -> None:
        """As in ReplicaEvents, or several replicas have."""
        self.queue.take_back()
        self._pump_soon()

    def _check_left(self) -> None:
        """End all streams if the last replica is lost."""
        if self.placing.alive or self.state not in (EngineState.RUNNING, EngineState.DRAINING):
            return
        if self.state is EngineState.RUNNING:
            self.state = EngineState.FAILED
        self._end_all(self._failed_error)

    def _failed_error(self) -> EngineFailed:
        return self.placing.lost("no replica is left")

    # -- sessions -------------------------------------------------------------------------------

    def keep(self, cell: StreamCell, seconds: float | None) -> Kept | None:
        record, prefix = self.open[cell], self.open[cell].prefix
        home = next((each for each in self.placing.ready if each.name == record.home), None)
        kept = None if home is None else home.hold(prefix, seconds)
        if kept is None or home is None:
            return None
        return Homed(kept, home, page_hashes(record.key, hash(record.namespace)))

    async def move(self, prefix: Prefix, replica: str, seconds: float | None) -> Kept | None:
        target = next((each for each in self.placing.ready if each.name == replica and each.takes_work), None)
        if target is None:
            raise InvalidRequest("replica", f"there is none named {shown(replica)} that takes requests")
        if not prefix.ids:
            return None
        pages = page_hashes(token_key(prefix.ids), hash(namespace_of(*prefix[1:])))
        source = self.placing.home(pages, target)
        if source is not None and self.share is not None:
            try:
                await self.share()
                await carry(prefix, source, target)
            except (ConfigError, EngineError) as error:
                _log.debug("a session moves without its pages: %r", error)
        kept = await target.warm(prefix, seconds)
        target.remember(pages)
        return None if kept is None else Homed(kept, target, pages)

    async def store(
        self, ids: Sequence[int], cache_salt: str, adapter: str | None, into: PageStore | None = None
    ) -> int:
        """As in Service, of the replica that has most of it, if it is one of this process."""
        engines = [each.engine for each in self.placing.ready if isinstance(each, LocalReplica)]
        if into is None or not engines:
            return 0
        has_most = max(
            engines, key=lambda engine: engine.cached_tokens(ids, cache_salt=cache_salt, adapter=adapter)
        )
        return await has_most._started().store(ids, cache_salt, adapter, into)

    def attach(self, store: PageStore) -> bool:
        """As in Service: they can if all replicas are in this process."""
        for each in self.placing.ready:
            if not (isinstance(each, LocalReplica) and each.engine._started().attach(store)):
                self.detach(store)
                return False
        return True

    def detach(self, store: PageStore) -> None:
        for each in self.placing.replicas:
            if isinstance(each, LocalReplica) and each.engine.ready:
                each.engine._started().detach(store)

    # -- endings --------------------------------------------------------------------------------

    def _abort(self, record: Record, error: RequestError | EngineError | None) -> None:
        attempt = self.attempts.get(record)
        if attempt is not None:
            self._leave(attempt, abort=True)
        record.finish(Ending("abort", error=error), self.clock())

    def _ended(self, record: Record) -> None:
        self.queue.remove(record)
        self.handovers.drop(record)
        super()._ended(record)

    def measure(self, measuring: Measuring, stats: Callable[[], EngineStats]) -> None:
        """Begin to measure requests, and steps of replicas on this loop."""
        measure(self, measuring, str(self.config.policy), lambda: (stats(), self.unread))
        for replica in self.placing.ready:
            replica.follow(self.observers)

    def outlive_loop(self) -> None:
        """The loop was closed before the dispatcher."""
        self.state = EngineState.CLOSED
        for record in self.open.values():
            record.finish(Ending("abort", error=EngineClosed("the event loop was closed")), self.clock())
        self.open.clear()
        self.attempts.clear()
        self.seats.close()
        self._intake.close()
        self.observers.closed()

    async def close(self, drain: float, closing: Sequence[Replica]) -> None:
        """End the streams, after ``drain`` seconds at most, and the replicas."""
        try:
            if drain > 0 and self.open and self.state is EngineState.DRAINING and self.placing.alive:
                await self._drain(drain)
        finally:
            self._end_all(lambda: EngineClosed("the dispatcher was closed"))
            self.seats.close()
            await self.handovers.aclose()
            self._intake.close()
            try:
                # One that is starting is closed by what starts it.
                for each in closing:
                    if each.state is ReplicaState.STARTING:
                        each.give_up()
                await close_all([each for each in closing if each.state is not ReplicaState.STARTING])
            finally:
                self.state = EngineState.CLOSED
                self.observers.closed()
