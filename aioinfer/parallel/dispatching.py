"""Dispatching: a started dispatcher. It keeps the record of every stream and sends it to a replica.

::

    generate() ── queue ── pump ──► attempt ──► replica          the record of a stream outlives its attempts
                    ▲                  │
                    └── lost, moved ───┴── rows ──► record ──► stream

Requests wait here and not in the replicas: one is sent when a replica has a slot and little to prefill. So
order, priorities, deadlines and limits hold for all replicas together, a replica that joins has work at once,
and one that is lost takes little with it. There is no task per stream and no timer but deadlines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from aioinfer.config import EngineConfig
from aioinfer.errors import (
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    Rejected,
    RequestError,
    StepFailed,
    TimedOut,
)
from aioinfer.loop.checks import Checks
from aioinfer.loop.intake import Intake
from aioinfer.loop.loop_bound import EngineState
from aioinfer.loop.options import Prompt, PromptForm, PromptSource, RequestOptions
from aioinfer.loop.resumption import check
from aioinfer.parallel.adapters import ReplicaAdapters
from aioinfer.parallel.placing import Placement, Placing, Wanted, has_adapter, makes_the_same
from aioinfer.parallel.queue import RecordQueue
from aioinfer.parallel.record import Attempt, Diverged, Ending, Record, Unwanted
from aioinfer.parallel.replica import Replica, ReplicaState, Rows, close_all
from aioinfer.parallel.streams import OpenStreams, cell_of, record_of
from aioinfer.parallel.weights import ReplicaWeights
from aioinfer.params import SamplingParams
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.scheduling.request import ParkedFor, Request, RequestState
from aioinfer.stream import Stream, StreamCell, tell_lanes

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Dispatching", "OnLoss"]

_log = logging.getLogger("aioinfer")

OnLoss = Literal["identical", "continue", "fail"]

#: requests that are sent in one turn of the loop
_MOST_SENT = 32
#: losses at one and the same token after which the request itself is blamed
_MOST_LOSSES = 2
#: losses before it had a row, after which it is given up
_MOST_UNBEGUN = 4
_READER = frozenset({ParkedFor.READER})


class Dispatching(OpenStreams):
    """Belongs to the loop on which it is made. Streams know it as their owner, replicas as what they report
    to, and the dispatcher as what takes requests."""

    def __init__(
        self,
        config: EngineConfig,
        placing: Placing,
        intake: Intake,
        info: DeviceInfo,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
        *,
        on_loss: OnLoss,
    ) -> None:
        super().__init__(info, clock)
        self.config = config
        self.tokenizer = tokenizer
        self.placing = placing
        self.on_loss = on_loss
        #: counts: streams that went on elsewhere, attempts with another output, tokens that came late
        self.resumed, self.diverged, self.late_tokens = 0, 0, 0
        #: seconds from a loss to the next token, of streams that have that, in all
        self.resume_seconds = 0.0
        self._checks = Checks(config, info, tokenizer)
        self._intake = intake
        self.queue = RecordQueue(config, info, tokenizer, self._checks, intake, self._accepted, self.end)
        self._attempts = 0
        self.adapters = ReplicaAdapters(self, placing, self.adapted)
        self.weights = ReplicaWeights(self, placing, self.adapted)
        #: a pump is scheduled
        self._due = False
        #: told of each replica that is lost
        self.when_lost: Callable[[Replica], None] | None = None
        #: set while something waits for the ends of a replica's requests
        self._emptied: asyncio.Future[None] | None = None

    # -- as Serving -----------------------------------------------------------------------------

    def source(
        self,
        prompt: Prompt,
        template_kwargs: Mapping[str, Any] | None = None,
        form: PromptForm | None = None,
    ) -> PromptSource:
        """As in Serving."""
        return PromptSource.of(prompt, self.tokenizer, self.info, template_kwargs, form)

    def generate(
        self,
        prompt: PromptSource,
        params: SamplingParams,
        options: RequestOptions,
        checkpoint: StreamCheckpoint | None = None,
    ) -> Stream:
        """As in Serving."""
        self._checks.check(params, options.pooling, prompt.least_tokens)
        if checkpoint is not None:
            check(checkpoint, self.info, self._checks.stop_ids(params))
        self.adapters.check(options.adapter, checkpoint)
        record = Record.arriving(params, options, self.clock())
        cell = StreamCell(record, options.running_timeout, options.max_lag)
        try:
            self.queue.check(prompt.least_tokens)
            self.queue.arrive(record, prompt, checkpoint)
        except Rejected:
            self.observers.rejected()
            raise
        self._open[record] = None
        self._pump_soon()
        if self.observers:
            self.observers.opened(record, chat=prompt.chat)
        self._set_timer(record)
        return Stream(self, cell)

    async def encode(self, prompt: PromptSource) -> Sequence[int]:
        """As in Serving."""
        return await self._intake.encode(prompt)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """As in Serving."""
        return await self._intake.decode(
            self.tokenizer, ids, self.info.vocab_size, skip_special_tokens=skip_special_tokens
        )

    def _accepted(self, record: Record) -> None:
        cell_of(record).notify()
        self._pump_soon()

    # -- the pump -------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._due:
            self._due = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what replicas have room for, in the order of the queue."""
        self._due = False
        if self.state is EngineState.CLOSED:
            return
        for _ in range(_MOST_SENT):
            record = self.queue.first
            if record is None or not self._send_or_refuse(record):
                return
        self._pump_soon()

    def _send_or_refuse(self, record: Record) -> bool:
        """Send a request or end it. Whether the next one may try."""
        wanted, picky = self._wanted(record), record.options.adapter is not None
        if (picky or wanted is not None) and not self.placing.computes(record, wanted):
            if self.placing.computes(record, wanted, soon=True):
                self.queue.set_aside(record)
            else:
                self.end(record, self._nowhere(record, wanted))
            return True
        try:
            placement = self.placing.choose(record, wanted)
        except Exception as cause:  # a policy of the application
            _log.error("%s could not be placed", record, exc_info=cause)
            self.end(record, _step_failed("the policy chose no replica", cause))
            return True
        if placement is None:
            return False
        replica = placement.replica
        try:
            self._send(record, placement, wanted)
        except Rejected as error:
            if not self.placing.full(replica):
                self.end(record, error)  # others fill it
        except (EngineFailed, EngineClosed) as error:
            self.lost(replica, error)
        except (RequestError, EngineError) as error:
            self.end(record, error)
        except Exception as cause:
            _log.error("%s could not be sent to %s", record, replica.name, exc_info=cause)
            self.end(record, _step_failed("the request could not be sent", cause))
        return True

    def _wanted(self, record: Record) -> Wanted | None:
        """Arithmetic and weights that an output must go on with. None: any."""
        if self.on_loss != "identical" or not record.output_ids or not record.identical:
            return None
        return Wanted(record.numerics, record.newest_version)

    def _nowhere(self, record: Record, wanted: Wanted | None) -> RequestError | EngineError:
        """The error of a request that no replica computes, now or soon."""
        adapter = record.options.adapter
        if wanted is not None and not any(map(wanted.is_of, self.placing.ready)):
            return self._for_good(record, f"no replica left has {wanted}")
        assert adapter is not None
        if record.output_ids:
            return self._for_good(record, f"no replica left has its adapter {adapter!r}")
        return self.adapters.missing(adapter)

    def _send(self, record: Record, placement: Placement, wanted: Wanted | None) -> None:
        self._attempts += 1
        attempt = Attempt(record, placement.replica, self._attempts)
        attempt.wanted = wanted
        checkpoint = None
        if not record.output_ids:
            record.prompt_logprobs.clear()  # it computes all of them
        elif makes_the_same(placement.replica, record):
            checkpoint = record.checkpoint(self.info)
        else:
            checkpoint = record.checkpoint_of_tokens(self.info)
        self.placing.place(attempt, placement)
        try:
            placement.replica.submit(attempt, checkpoint, *record.time_left(self.clock()))
        except BaseException:
            self.placing.ended(attempt)
            attempt.ended = True
            raise
        self.queue.remove(record)
        cell_of(record).cancel_timer()
        record.attempt = attempt
        if not record.output_ids:
            record.numerics = placement.replica.info.numerics
            record.adapter_fingerprint = placement.replica.fingerprint_of(record.options.adapter)

    # -- as ReplicaEvents -----------------------------------------------------------------------

    def moved(self, rows: Sequence[tuple[Attempt, Rows]]) -> None:
        """As in ReplicaEvents."""
        told: list[Request] = []
        for attempt, brought in rows:
            if attempt.ended:
                self.late_tokens += len(brought.ids)
                continue
            try:
                moved = self._take(attempt, brought)
                if brought.ending is not None:
                    self._finish(attempt, brought.ending)
                elif moved and not (told and told[-1] is attempt.record):
                    told.append(attempt.record)
            except Unwanted:
                self._leave(attempt, abort=True)
                self._again(attempt.record)
            except Diverged as error:
                self._diverged(attempt, error)
            except ValueError as error:
                self.lost(attempt.replica, error)
        for request in tell_lanes(told):
            cell = cell_of(request)
            cell.notify()
            if cell.max_lag is not None:
                self._parks(record_of(request), cell)

    def _parks(self, record: Record, cell: StreamCell) -> None:
        """The replica parks what its consumer does not read, as far as it knows; here is how far that is."""
        if cell.lags:
            record.parked_for = _READER
        elif record.attempt is not None:
            record.attempt.replica.caught_up(record.attempt)

    def _take(self, attempt: Attempt, rows: Rows) -> bool:
        record = attempt.record
        if rows.admitted_at is not None:
            if record.admitted_at is None:
                record.admitted_at = rows.admitted_at
                record.state = RequestState.RUNNING
            if not attempt.resumes:
                record.kv.cached_tokens = rows.cached_tokens
            self.placing.admitted(attempt, rows.cached_tokens)
        if rows.adapter_fingerprint and not record.output_ids:
            record.adapter_fingerprint = rows.adapter_fingerprint
        more = attempt.bring(rows)
        if rows.prompt_logprobs and len(rows.prompt_logprobs) > len(record.prompt_logprobs):
            record.prompt_logprobs[:] = rows.prompt_logprobs
        if rows.ids and attempt.uncached:
            self.placing.begun(attempt)
            self._pump_soon()
        if more and record.lost_at is not None:
            self.resume_seconds += self.clock() - record.lost_at
            record.lost_at = None
        if rows.draft is not None:
            record.redrafted(rows.draft)
            return True
        return more

    def _finish(self, attempt: Attempt, ending: Ending) -> None:
        record, error = attempt.record, ending.error
        self._leave(attempt)
        full = isinstance(error, Rejected) and self.placing.full(attempt.replica)
        # What it asks for was replaced or unloaded on its way.
        if full or (isinstance(error, InvalidRequest) and not has_adapter(attempt.replica, record)):
            self._again(record)
            return
        if isinstance(error, TimedOut):
            # The replica knows the time that was left.
            options = record.options
            seconds = options.waiting_timeout if error.phase == "waiting" else options.running_timeout
            ending.error = error if seconds is None else TimedOut(error.phase, seconds)
        record.finish(ending, self.clock())
        self._ended(record)

    def leaving(self, replica: Replica) -> None:
        """As in ReplicaEvents."""
        self.drain(replica)

    def lost(self, replica: Replica, cause: BaseException) -> None:
        """As in ReplicaEvents."""
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

    def _diverged(self, attempt: Attempt, error: Diverged) -> None:
        _log.error("%s on %s: %s", attempt.record, attempt.replica.name, error)
        self.diverged += 1
        self._lose(attempt, error, begun=True)

    def _lose(self, attempt: Attempt, cause: BaseException, *, begun: bool = False) -> None:
        """Give up a lost attempt: its stream goes on elsewhere, or fails."""
        record = attempt.record
        begun = begun or attempt.replica.begun(attempt)
        self._leave(attempt, abort=True)
        record.unbegun += not begun
        if begun:
            record.unbegun = 0
            if len(record.output_ids) > record.lost_length:
                record.losses.clear()
            record.losses.append(cause)
            record.lost_length = len(record.output_ids)
        if self.on_loss == "fail":
            self.end(record, self._for_good(record, "its replica is lost", cause))
        elif len(record.losses) >= _MOST_LOSSES:
            self.end(record, self._for_good(record, f"{len(record.losses)} replicas were lost with it"))
        elif record.unbegun >= _MOST_UNBEGUN:
            reason = f"{record.unbegun} replicas were lost before they had begun with it"
            self.end(record, self._for_good(record, reason, cause))
        else:
            self._again(record)

    def _again(self, record: Record) -> None:
        """Queue a stream for another attempt."""
        if record.lost_at is None and record.admitted_at is not None:
            record.lost_at = self.clock()
        self.resumed += record.admitted_at is not None
        self._set_timer(record)
        self.queue.add(record)
        self._pump_soon()

    def _leave(self, attempt: Attempt, *, abort: bool = False) -> None:
        attempt.ended = True
        if attempt.record.attempt is attempt:
            attempt.record.attempt = None
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

    def _for_good(self, record: Record, reason: str, cause: BaseException | None = None) -> EngineFailed:
        return self.placing.lost(reason, record.losses if cause is None else [cause])

    # -- endings --------------------------------------------------------------------------------

    def end(self, record: Record, error: RequestError | EngineError | None) -> None:
        """End a stream in any state."""
        attempt = record.attempt
        if attempt is not None:
            self._leave(attempt, abort=True)
        record.finish(Ending("abort", error=error), self.clock())
        self._ended(record)

    def _ended(self, record: Record) -> None:
        self.queue.remove(record)
        super()._ended(record)

    def outlive_loop(self) -> None:
        """The loop was closed before the dispatcher."""
        self.state = EngineState.CLOSED
        for record in list(self._open):
            record.finish(Ending("abort", error=EngineClosed("the event loop was closed")), self.clock())
        self._open.clear()
        self._intake.close()
        self.observers.closed()

    async def close(self, drain: float, closing: Sequence[Replica]) -> None:
        """End the streams, after ``drain`` seconds at most, and the replicas."""
        try:
            if drain > 0 and self._open and self.state is EngineState.DRAINING and self.placing.alive:
                await self._drain(drain)
        finally:
            self._end_all(lambda: EngineClosed("the dispatcher was closed"))
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


def _step_failed(what: str, cause: Exception) -> StepFailed:
    error = StepFailed(f"{what}: {cause!r}")
    error.__cause__ = cause
    return error
