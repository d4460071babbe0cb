"""RecordQueue: requests of a dispatcher, from their arrival until a replica has them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from aioinfer.config import EngineConfig
from aioinfer.errors import EngineError, InvalidRequest, Rejected, RequestError
from aioinfer.loop.checks import Checks
from aioinfer.loop.intake import Intake, Preparation
from aioinfer.loop.options import Prepared, PromptSource
from aioinfer.loop.preparing import Preparing
from aioinfer.parallel.record import Record
from aioinfer.params import SamplingParams
from aioinfer.resuming.record import StreamCheckpoint

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["RecordQueue"]


class _Examined:
    """Prepares a request as an engine does, to find what is wrong with it before one has it."""

    __slots__ = ("_checks", "_preparing")

    def __init__(self, checks: Checks, preparing: Preparing) -> None:
        self._checks = checks
        self._preparing = preparing

    def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, checkpoint: StreamCheckpoint | None = None
    ) -> Prepared:
        """As in Completes."""
        return self._preparing.complete(prompt_ids, params, self._checks.stop_ids(params))


class RecordQueue:
    """Ordered by arrival, or by priority; outputs that have begun go first. Its limits are those of the
    config."""

    __slots__ = (
        "_accepted",
        "_arrivals",
        "_arrived",
        "_arriving_tokens",
        "_aside",
        "_checks",
        "_config",
        "_examined",
        "_info",
        "_intake",
        "_keys",
        "_ranked",
        "_records",
        "_refused",
        "_seeds",
        "_text",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        config: EngineConfig,
        info: DeviceInfo,
        tokenizer: Tokenizer | None,
        checks: Checks,
        intake: Intake,
        accepted: Callable[[Record], None],
        refused: Callable[[Record, RequestError | EngineError], None],
    ) -> None:
        """``accepted`` and ``refused`` are told of a request whose prompt had to be tokenized first, never
        amid a call of a method."""
        self._config = config
        self._info = info
        self._intake = intake
        self._accepted, self._refused = accepted, refused
        self._text = tokenizer is not None
        self._checks = checks
        self._examined = _Examined(checks, Preparing(config, info, tokenizer, drafts=False))
        self._ranked = config.policy == "priority"
        self._seeds = random.Random(config.seed)
        self._keys, self._arrived = 0, 0
        self._arrivals: dict[Record, Preparation] = {}
        #: least number of tokens in their prompts
        self._arriving_tokens = 0
        self._records: SortedDict = SortedDict()
        #: those that no replica may compute at present
        self._aside: dict[Record, None] = {}
        #: of the prompts and outputs that wait
        self.tokens = 0

    def __len__(self) -> int:
        """Requests that wait for a replica."""
        return len(self._records) + len(self._aside)

    @property
    def arriving(self) -> int:
        """Requests whose prompts are being tokenized."""
        return len(self._arrivals)

    @property
    def first(self) -> Record | None:
        """The request that goes next."""
        record: Record | None = self._records.peekitem(0)[1] if self._records else None
        return record

    def check(self, tokens: int) -> None:
        """Raise Rejected if a request with this many tokens is too much."""
        waiting = len(self) + len(self._arrivals)
        if waiting >= self._config.max_queued_requests:
            raise Rejected(f"{waiting} requests are waiting already (max_queued_requests)")
        known = self.tokens + self._arriving_tokens
        if known and known + tokens > self._config.max_queued_tokens:
            raise Rejected(f"{known} prompt tokens are waiting already (max_queued_tokens)")

    def arrive(self, record: Record, source: PromptSource, checkpoint: StreamCheckpoint | None) -> None:
        """A new request: it waits at once if its prompt has its tokens and nothing has to be worked out.
        Raises InvalidRequest and Rejected, then."""
        if source.ids is not None and not record.params.worked_out:
            self._accept(record, source.ids, checkpoint)
            return
        prepared = functools.partial(self._prepared, record, checkpoint)
        arrival = self._intake.prepare(self._examined, source, record.params, prepared)
        self._arrivals[record] = arrival
        self._arriving_tokens += arrival.least_tokens

    def _prepared(
        self,
        record: Record,
        checkpoint: StreamCheckpoint | None,
        prepared: Prepared | None,
        error: BaseException | None,
    ) -> None:
        self._leave_arrivals(record)
        try:
            if prepared is None:
                assert error is not None
                raise error
            self._accept(record, prepared.prompt_ids, checkpoint)
        except (RequestError, EngineError) as refused:
            self._refused(record, refused)
        except BaseException as cause:  # anything that a worker thread can raise, panics of Rust included
            wrong = InvalidRequest("prompt", f"could not be tokenized: {cause!r}")
            wrong.__cause__ = cause
            self._refused(record, wrong)
        else:
            self._accepted(record)

    def _accept(self, record: Record, ids: Sequence[int], checkpoint: StreamCheckpoint | None) -> None:
        self._checks.check_length(record.params, len(ids), record.options.pooling)
        self.check(len(ids))
        self._keys += 1
        self._arrived += not record.queue_behind
        seed = record.params.seed if checkpoint is None else checkpoint.seed
        if seed is None:
            seed = self._seeds.getrandbits(63)
        record.prepared(self._keys, ids, seed, self._arrived, self._info, text=self._text)
        if checkpoint is not None:
            record.begin(checkpoint)
        self.add(record)

    def add(self, record: Record) -> None:
        """It waits for a replica, perhaps again."""
        rank = -record.priority if self._ranked else 0
        record.queued = (record.admitted_at is None, rank, *record.place)
        self._records[record.queued] = record
        self.tokens += record.known

    def set_aside(self, record: Record) -> None:
        """It waits until :meth:`take_back`, and does not hold up the others."""
        del self._records[record.queued]
        self._aside[record] = None

    def take_back(self) -> None:
        """All wait in their places again."""
        for record in self._aside:
            self._records[record.queued] = record
        self._aside.clear()

    def remove(self, record: Record) -> None:
        """It was sent or has ended. Idempotent."""
        self._leave_arrivals(record)
        if record.queued is not None:
            if record in self._aside:
                del self._aside[record]
            else:
                del self._records[record.queued]
            self.tokens -= record.known
            record.queued = None

    def _leave_arrivals(self, record: Record) -> None:
        arrival = self._arrivals.pop(record, None)
        if arrival is not None:
            arrival.cancel()
            self._arriving_tokens -= arrival.least_tokens
