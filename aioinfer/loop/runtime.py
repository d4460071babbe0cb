"""Runtime: a started engine, from the open device to its closing."""

from __future__ import annotations

import asyncio
import logging
from collections import abc
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from aioinfer.cache.namespace import Namespace
from aioinfer.cells import StreamCell, tell_lanes
from aioinfer.config import EngineConfig
from aioinfer.errors import EngineClosed, EngineError, EngineFailed, RequestError, StepFailed
from aioinfer.loop.driver import Driver
from aioinfer.loop.going_on import GoingOn
from aioinfer.loop.holding import Held, Holding
from aioinfer.loop.observing import measure
from aioinfer.loop.opened import OpenRequest
from aioinfer.loop.options import Prepared
from aioinfer.loop.pacing import Pace
from aioinfer.loop.service import EngineState
from aioinfer.loop.transfers import PageTransfers
from aioinfer.loop.tuning import Tuning
from aioinfer.loop.updating import Updates
from aioinfer.observe.stats import EngineStats
from aioinfer.params import SamplingParams
from aioinfer.request import Output
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.scheduling.adapters import AdapterVersion
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.adapters import AdapterLoads
    from aioinfer.loop.core import Core
    from aioinfer.loop.intake import Intake
    from aioinfer.observe.metrics.measuring import Measuring
    from aioinfer.tiers.store import PageStore

__all__ = ["Runtime"]

_log = logging.getLogger("aioinfer")


class _Open(OpenRequest):
    """A request of this engine, with its sequence once its prompt is tokenized."""

    __slots__ = ("adapter", "sequence")

    def __init__(self, cell: StreamCell, adapter: AdapterVersion | None) -> None:
        super().__init__(cell)
        self.adapter = adapter
        self.sequence: Sequence | None = None


class Runtime(GoingOn[_Open]):
    """The parts of a started engine and its open requests.

    The driver reports to :meth:`admitted`, :meth:`updated`, :meth:`moved` and :meth:`lost`.
    """

    def __init__(
        self, config: EngineConfig, core: Core, launcher: Launcher, intake: Intake, adapters: AdapterLoads
    ) -> None:
        """``config`` leaves nothing open: see :func:`aioinfer.loop.factory.decide`."""
        from aioinfer.loop.answers import Answers  # imports numpy

        super().__init__(config, core.info, core.tokenizer, core.checks, intake, core.clock)
        self.core = core
        self.launcher = launcher
        #: why it is FAILED
        self.failure: BaseException | None = None
        self.adapters = adapters
        adapters.check_serving = self.check_serving
        self.tuning = Tuning.of(
            config.switch_interval,
            config.gc,
            asynchronous=launcher.asynchronous,
            thread=config.launch_mode == "thread",
        )
        self.driver = Driver(
            core,
            launcher,
            config.overlap_steps or 0,
            self,
            garbage=self.tuning.garbage,
            pace=Pace() if config.plan_late else None,
            observers=self.observers,
        )
        self.updates = Updates(
            *(core, launcher, intake, self.driver),
            end=self.end_sequence,
            lost=self.lost,
            check=self.check_serving,
        )
        self.answers = Answers(
            *(core, intake, config.grammar_patience),
            updated=self.updated,
            end=self.end_sequence,
            wake=self.driver.wake,
        )
        self.transfers = PageTransfers(
            core, launcher.device, intake.loop, wake=self.driver.wake, nudge=self.driver.nudge, lost=self.lost
        )
        if self.transfers.possible and core.info.block_size is None:
            core.scheduler.memory.copy_page = self.transfers.copy_page
        self.holding = Holding(core.scheduler.memory, self.loop, config.max_held_share)
        launcher.watch(self.lost)
        self._closing: asyncio.Task[None] | None = None

    # -- requests -------------------------------------------------------------------------------

    def _opened(self, cell: StreamCell, checkpoint: StreamCheckpoint | None) -> _Open:
        adapter = self.core.adapter(cell.output.request, checkpoint)
        cell.output.weight_version = self.core.weight_version
        if adapter is not None:
            adapter.users.add(cell.output)
            cell.output.adapter_fingerprint = adapter.fingerprint
        if self.tuning.garbage is not None:
            self.tuning.garbage.arrived()
        return _Open(cell, adapter)

    def _complete(
        self, ids: abc.Sequence[int], params: SamplingParams, checkpoint: StreamCheckpoint | None
    ) -> Prepared:
        return self.core.complete(ids, params, checkpoint)

    def _accept(self, opened: _Open, prepared: Prepared, checkpoint: StreamCheckpoint | None) -> None:
        self.driver.work_arrives()
        try:
            opened.sequence = self.core.submit(opened.output, prepared, opened.cell, opened.adapter)
        except (RequestError, EngineError):
            raise
        except Exception as cause:
            _log.error("%r could not be queued", opened.output, exc_info=cause)
            raise StepFailed(f"the request could not be queued: {cause}") from cause
        self.driver.wake()

    @property
    def queued(self) -> tuple[int, int]:
        return self.core.queued

    @property
    def room(self) -> tuple[int, int]:
        return (0, 0) if self.driver.paused else self.core.room

    def _left(self, opened: _Open) -> None:
        if opened.adapter is not None:
            last_step = 0 if opened.sequence is None else opened.sequence.kv.last_step
            self.core.adapters.leave(opened.adapter, opened.output, last_step)

    def _abort(self, opened: _Open, error: RequestError | EngineError | None) -> None:
        assert opened.sequence is not None
        self.core.abort(opened.sequence, error)
        self.driver.wake()

    def _share(self, cell: StreamCell) -> tuple[bytes, Sequence] | None:
        opened = self.open.get(cell)
        if opened is None or opened.sequence is None:
            return None
        self.core.commit(opened.sequence)
        return opened.sequence.token_key(0, len(cell.output.prompt_ids)), opened.sequence

    def _place(self, opened: _Open) -> tuple[int, ...]:
        assert opened.sequence is not None
        return opened.sequence.place[:2]  # the same for what it is now and for what it was before

    def _swap(self, opened: _Open, output: Output) -> None:
        sequence, adapter = opened.sequence, opened.adapter
        assert sequence is not None
        self._abort(opened, None)
        self.answers.drop(sequence)
        # A step in flight that fails reports it, and not to the reader of the other output.
        sequence.consumer = StreamCell(sequence.output)
        output.weight_version = self.core.weight_version
        if adapter is not None:
            adapter.users.add(output)
            output.adapter_fingerprint = adapter.fingerprint
            self.core.adapters.leave(adapter, sequence.output, sequence.kv.last_step)
        opened.output, opened.sequence, opened.cell.output = output, None, output

    def end_sequence(self, sequence: Sequence, error: RequestError | EngineError | None) -> None:
        """End a request by its sequence."""
        self.end(self.open[_cell(sequence)], error)

    # -- as DriverEvents ------------------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        """Replace the request's waiting deadline by its running deadline, and tell its outlet."""
        cell = _cell(sequence)
        cell.cancel_timer()
        if cell.outlet is not None:
            cell.outlet.lane.moved((cell.outlet,))
        self._set_timer(self.open[cell], "running", sequence.request.running_timeout)
        self._has_room()

    def updated(self, sequence: Sequence) -> None:
        """Wake the consumer, or end its stream; park the request if the consumer lags."""
        cell = sequence.consumer
        assert isinstance(cell, StreamCell)
        if cell.output.ended:
            opened = self.open.get(cell)
            if opened is not None:
                self._ended(opened)
            return
        cell.notify()
        if cell.max_lag is not None and cell.lags:
            self.core.scheduler.queues.park(sequence)
            cell.parked = True

    def moved(self, sequences: list[Sequence]) -> list[Sequence]:
        """Tell the outlets of streams that have moved; returns the sequences of the others."""
        others = tell_lanes([each.consumer for each in sequences])
        if len(others) == len(sequences):
            return sequences
        left = set(others)
        return [each for each in sequences if each.consumer in left]

    def asked(self, sequences: list[Sequence]) -> None:
        """Have the logits processors of requests decide how they go on."""
        self.answers.ask(sequences)

    def audit(self) -> None:
        """Assert that every open request is where it should be. O(pages and requests)."""
        queues = self.core.scheduler.queues
        audit(self.core.scheduler)
        if queues.waiting:
            assert sorted(each.key for each in queues.waiting.order()) == sorted(
                each.key for each in queues.waiting
            )
        known = set(queues.unfinished())
        sequences = [each.sequence for each in self.open.values() if each.sequence is not None]
        opened = {each for each in sequences if not each.finished}
        assert known == opened, f"{opened ^ known} are lost"
        self.core.adapters.audit()

    def lost(self, cause: BaseException) -> None:
        """End every open stream with EngineFailed, caused by ``cause``."""
        if self.state in (EngineState.FAILED, EngineState.CLOSED):
            return
        _log.error("the engine is lost", exc_info=cause)
        self.failure = cause
        self.state = EngineState.FAILED
        self.adapters.close()
        self._end_all(self._failed_error)
        self.updates.request_ended()
        self.driver.stop()
        self.observers.failed(cause)

    def _failed_error(self) -> EngineFailed:
        error = EngineFailed(f"the engine is lost: {self.failure}")
        error.__cause__ = self.failure
        return error

    def keep(self, cell: StreamCell, seconds: float | None) -> Held | None:
        sequence = self.open[cell].sequence
        if sequence is None:
            return None
        return self.holding.hold(sequence.token_key(0, sequence.known), sequence.namespace, seconds)

    async def store(
        self, ids: abc.Sequence[int], cache_salt: str, adapter: str | None, into: PageStore | None = None
    ) -> int:
        version = None if adapter is None else self.core.adapters.find(adapter)
        uid, fingerprint = (0, "") if version is None else (version.uid, version.fingerprint)
        namespace = Namespace(cache_salt, uid, self.core.weight_version)
        if into is not None and not self.transfers.possible:
            return 0
        return await self.transfers.store(ids, namespace, fingerprint, into)

    def attach(self, store: PageStore) -> bool:
        if not self.transfers.possible:
            return False
        self.transfers.attach(store, only_read=True)
        return True

    def detach(self, store: PageStore) -> None:
        self.transfers.detach(store)

    # -- as StreamOwner -------------------------------------------------------------------------

    def caught_up(self, cell: StreamCell) -> None:
        cell.parked = False
        opened = self.open.get(cell)
        if opened is None or opened.sequence is None or cell.output.ended:
            return
        self.driver.work_arrives()
        try:
            self.core.scheduler.queues.unpark(opened.sequence)
        except Exception as cause:
            error = StepFailed(f"the request could not go on: {cause}")
            error.__cause__ = cause
            self.end(opened, error)
        self.driver.wake()

    # -- endings --------------------------------------------------------------------------------

    def _ended(self, opened: _Open) -> None:
        super()._ended(opened)
        if opened.sequence is not None:
            self.answers.drop(opened.sequence)
        self.updates.request_ended()

    # -- closing --------------------------------------------------------------------------------

    async def aclose(self, drain: float | None) -> None:
        """As :meth:`aioinfer.Engine.aclose`; ``drain`` is in seconds, None to end requests at once."""
        if self.state is EngineState.RUNNING:
            self.state = EngineState.DRAINING
        if self._closing is None:
            self._closing = self.loop.create_task(self._close(drain or 0.0), name="aioinfer-closing")
        elif drain is None:
            self._set_drained()
        await asyncio.shield(self._closing)

    async def _close(self, drain: float) -> None:
        """Cancelled at any point, twice too, it leaves nothing behind that does not end by itself. What one
        step raises is raised when all are done."""
        async with AsyncExitStack() as steps:  # the last one goes first
            steps.callback(self._closed)
            steps.push_async_callback(self.adapters.aclose)
            steps.push_async_callback(self.updates.aclose)
            steps.push_async_callback(self.launcher.aclose)
            steps.push_async_callback(self.transfers.aclose, drain)
            steps.push_async_callback(self.answers.aclose)
            steps.callback(self._intake.close)
            steps.callback(self.tuning.undo)
            steps.callback(self.driver.stop)
            steps.callback(self.updates.close)
            steps.callback(self.holding.close)
            steps.callback(self.seats.close)
            steps.callback(self._end_all, lambda: EngineClosed("the engine was closed"))
            steps.callback(self.adapters.close)
            if drain > 0 and self._busy and self.failure is None:
                await self._drain(drain)

    def _closed(self) -> None:
        self.state = EngineState.CLOSED
        self.core.preparing.close()
        self.observers.closed()

    def outlive_loop(self) -> None:
        """The loop was closed before the engine: end what is left. A stream that is kept does not keep the
        device, and with it the model."""
        self.state = EngineState.CLOSED
        self.tuning.undo()
        self._intake.close()
        self.transfers.close()
        for cell in self.open:
            cell.output.refuse(EngineClosed("the event loop of the engine was closed"))
        self.open.clear()
        self.core.preparing.close()
        self.observers.closed()
        self.seats.close()
        self.holding.close()
        del self.core, self.driver, self.launcher, self.adapters, self.updates, self.transfers, self.holding
        del self.answers

    # -- observing ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; O(1)."""
        driver = self.driver
        return EngineStats.of(
            self.core.scheduler,
            output_tokens=self.core.texts.output_tokens,
            state=self.state.value,
            paused=driver.paused,
            arriving=self.arriving,
            steps_in_flight=driver.steps_in_flight,
            failed_checks=driver.failed_checks,
            stalled=0.0 if self.state is EngineState.CLOSED else driver.stalled,
            timeline=self.launcher.timeline,
            adapters_loaded=len(self.core.adapters.loaded),
            adapters_draining=self.core.adapters.draining,
            sessions=len(self.seats.taken),
            holds_expired=self.holding.expired,
        )

    def measure(self, measuring: Measuring) -> None:
        """Begin to record what the metrics are made of."""
        policy = self.core.scheduler.queues.waiting.name
        measure(self, measuring, policy, lambda: (self.stats(), self.unread))


def _cell(sequence: Sequence) -> StreamCell:
    """The stream's end of a sequence; every sequence of an engine has one."""
    assert isinstance(sequence.consumer, StreamCell)
    return sequence.consumer
