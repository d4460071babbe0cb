"""Sending: what waits in a started dispatcher, and how it is sent to replicas."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from aioinfer.config import EngineConfig
from aioinfer.errors import (
    EngineClosed,
    EngineError,
    EngineFailed,
    Rejected,
    RequestError,
    StepFailed,
)
from aioinfer.loop.checks import Checks
from aioinfer.loop.going_on import GoingOn
from aioinfer.loop.intake import Intake
from aioinfer.loop.service import EngineState
from aioinfer.parallel.adapters import ReplicaAdapters
from aioinfer.parallel.placing import Placement, Placing, makes_the_same
from aioinfer.parallel.queue import RecordQueue
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Attempt, ReplicaEvents, Wanted
from aioinfer.parallel.roles import Role

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["OnLoss", "Sending"]

_log = logging.getLogger("aioinfer")

OnLoss = Literal["identical", "continue", "fail"]

#: requests that are sent in one turn of the loop
_MOST_SENT = 32


class Sending(GoingOn[Record], ReplicaEvents):
    """The way of a record from the queue to a replica."""

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
        super().__init__(config, info, tokenizer, Checks(config, info, tokenizer), intake, clock)
        self.placing = placing
        self.on_loss = on_loss
        self.queue = RecordQueue(ranked=config.policy == "priority")
        self._attempts = 0
        #: what computes a record now
        self.attempts: dict[Record, Attempt] = {}
        self.adapters = ReplicaAdapters(self, placing, self.adapted)
        #: a pump is scheduled
        self._due = False

    @abstractmethod
    def adapted(self) -> None:
        """As in ReplicaEvents, or several replicas have."""

    def _pump_soon(self) -> None:
        if not self._due:
            self._due = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what replicas have room for, in the order of the queue."""
        self._due = False
        if self.state is EngineState.CLOSED:
            return
        full: set[Role] = set()
        for _ in range(_MOST_SENT):
            record = self.queue.first(full)
            if record is None:
                return
            if not self._send_or_refuse(record):
                full.add(record.lane)
        self._pump_soon()

    def _enqueue(self, record: Record) -> None:
        """Have a record wait for a replica."""
        record.lane = self.placing.lane(record)
        self.queue.add(record)
        self._pump_soon()

    def _send_or_refuse(self, record: Record) -> bool:
        """Send a request or end it. Whether the next one may try."""
        wanted, picky = self._wanted(record), record.request.adapter is not None
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
            if not (error.full and self.placing.full(replica)):
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
        if not (record.output.token_ids and record.output.identical):
            return None
        wanted = Wanted(record.output.numerics, record.output.newest_version)
        if self.on_loss == "identical":
            return wanted
        # Nothing was lost, so nothing is to show: it rather waits.
        return wanted if record.handed_over and self.placing.computes(record, wanted) else None

    def _nowhere(self, record: Record, wanted: Wanted | None) -> RequestError | EngineError:
        """The error of a request that no replica computes, now or soon."""
        adapter = record.request.adapter
        if wanted is not None and not any(map(wanted.is_of, self.placing.ready)):
            return self._for_good(record, f"no replica left has {wanted}")
        assert adapter is not None
        if record.output.token_ids:
            return self._for_good(record, f"no replica left has its adapter {adapter!r}")
        return self.adapters.missing(adapter)

    def _send(self, record: Record, placement: Placement, wanted: Wanted | None) -> None:
        self._attempts += 1
        attempt = Attempt(record, placement.replica, self._attempts)
        attempt.wanted = wanted
        checkpoint = None
        if not record.output.token_ids:
            record.output.prompt_logprobs.clear()  # it computes all of them
        else:
            same = makes_the_same(placement.replica, record)
            checkpoint = record.checkpoint(self.info, whole_blocks=same)
        self.placing.place(attempt, placement)
        try:
            placement.replica.submit(attempt, checkpoint, record.time_left(self.clock()))
        except BaseException:
            self.placing.ended(attempt)
            attempt.ended = True
            raise
        self.queue.remove(record)
        self._has_room()
        record.cell.cancel_timer()
        self.attempts[record] = attempt
        record.home = placement.replica.name
        if not record.output.token_ids:
            record.output.numerics = placement.replica.info.numerics
            record.output.adapter_fingerprint = placement.replica.fingerprint_of(record.request.adapter)

    def _for_good(self, record: Record, reason: str, cause: BaseException | None = None) -> EngineFailed:
        return self.placing.lost(reason, record.losses if cause is None else [cause])


def _step_failed(what: str, cause: Exception) -> StepFailed:
    error = StepFailed(f"{what}: {cause!r}")
    error.__cause__ = cause
    return error
