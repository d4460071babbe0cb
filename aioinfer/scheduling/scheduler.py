"""The scheduler: who gets a row in the next step, and what a resolved step means.

Read :meth:`Scheduler.plan` first: decodes, then prefill chunks of admitted requests, then admissions,
all into one packed step. :meth:`Scheduler.resolve` commits a step's tokens. Nothing here waits, knows
the time or touches a device; the same object runs under the engine, the synchronous twin and the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.outputs import FinishReason
from aioinfer.request import Request, RequestState
from aioinfer.scheduling.admission import Limits, StepBudget, pages_to_admit
from aioinfer.scheduling.policy import Fcfs, WaitingQueue
from aioinfer.scheduling.step import BAD_LOGITS, Admission, Row, Step

__all__ = ["Scheduler", "SchedulerCounters"]


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts since the start."""

    steps: int = 0
    admitted: int = 0
    finished: int = 0
    retractions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: tokens computed for a request that had ended meanwhile
    late_tokens: int = 0


class Scheduler:
    """Continuous batching of packed rows over paged KV.

    Steps are launched in the order in which :meth:`plan` returns them and resolved in the same order,
    each by exactly one call of :meth:`resolve` or :meth:`fail`.
    """

    __slots__ = ("_last_step", "counters", "limits", "pages", "queued_tokens", "running", "slots", "waiting")

    def __init__(
        self, pages: PageAllocator, slots: SlotPool, limits: Limits, waiting: WaitingQueue | None = None
    ) -> None:
        self.pages = pages
        self.slots = slots
        self.limits = limits
        self.waiting: WaitingQueue = Fcfs() if waiting is None else waiting
        #: admitted requests, most senior first
        self.running: dict[int, Request] = {}
        self.queued_tokens = 0
        self.counters = SchedulerCounters()
        self._last_step = 0

    # -- what a request goes through ------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request whose prompt fits (``length < max_length``) and that was never queued."""
        self.waiting.add(request)
        self.queued_tokens += request.length

    def finish(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> bool:
        """End a request, whatever its state. The only way any request ends; True the first time.

        Its pages and slot come back when the last launched step that holds it has resolved.
        """
        if request.finished:
            return False
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self.queued_tokens -= request.length
        else:
            del self.running[request.key]
            self._give_back(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        self.counters.finished += 1
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    # -- plan -----------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """The next step, or None if nothing can be computed before a launched step resolves."""
        budget = StepBudget(self.limits)
        rows: list[Row] = []
        for request in list(self.running.values()):
            # Room for one request may be made by retracting others: always the most junior, so that none
            # which has its row already is lost, and one further down may be gone when its turn comes.
            if budget.tokens and _wants_decode(request) and self._reserve(request):
                rows.append(self._row(request, 1))
                budget.spend(1)
        num_decodes = len(rows)
        for request in list(self.running.values()):
            if budget.tokens and not request.relay_ready and request.computed < request.length:
                rows.append(self._prefill(request, budget))
        while budget.tokens and (admitted := self._admit()) is not None:
            rows.append(self._prefill(admitted, budget))
        if not rows:
            return None
        self._last_step += 1
        for row in rows:
            row.request.last_step = self._last_step
        num_tokens = self.limits.max_step_tokens - budget.tokens
        self.counters.steps += 1
        self.counters.decode_tokens += num_decodes
        self.counters.prefill_tokens += num_tokens - num_decodes
        return Step(self._last_step, tuple(rows), num_decodes, num_tokens)

    def _admit(self) -> Request | None:
        """Give the next waiting request a slot and pages for all it is known to hold."""
        request = self.waiting.peek()
        if request is None or len(self.running) >= self.limits.max_running_requests:
            return None
        # A retracted request waits until the host has read its tokens in flight: it prefills them.
        if request.pending or not self.slots.free:
            return None
        need = pages_to_admit(request, self.pages, len(self.running))
        if need is None:
            return None
        self.waiting.remove(request)
        self.queued_tokens -= request.length
        request.state = RequestState.RUNNING
        (request.slot,) = self.slots.take(1)
        request.pages = self.pages.take(need)
        request.sent_pages = 0
        self.running[request.key] = request
        self.counters.admitted += 1
        return request

    def _prefill(self, request: Request, budget: StepBudget) -> Row:
        chunk = budget.chunk(request.length - request.computed)
        budget.spend(chunk)
        return self._row(request, chunk)

    def _row(self, request: Request, length: int) -> Row:
        """Make a row of the next ``length`` positions and account for it as computed."""
        start = request.computed
        samples = start + length == request.length
        admission = None
        if start == 0:
            admission = Admission(
                request.params, request.seed, request.stop_ids, request.prompt_ids, tuple(request.output_ids)
            )
        row = Row(
            request=request,
            slot=request.slot,
            start=start,
            length=length,
            ids=None if request.relay_ready else request.known_ids(start, start + length),
            samples=samples,
            output_index=request.length - len(request.prompt_ids),
            new_pages=request.pages[request.sent_pages :],
            first_new_page=request.sent_pages,
            admission=admission,
        )
        request.sent_pages = len(request.pages)
        request.computed += length
        if samples:
            request.pending += 1
            request.relay_ready = True
        return row

    # -- memory ---------------------------------------------------------------------------------

    def _reserve(self, request: Request) -> bool:
        """Make sure the next position of a running request has its page; False: not in this step.

        Out of pages, the most junior request is retracted. Not before fenced pages are counted: those
        come back by themselves, and retracting for them would empty the engine for nothing.
        """
        if request.computed < len(request.pages) * self.pages.page_size:
            return True
        while not self.pages.free:
            if self.pages.fenced:
                return False
            victim = next(reversed(self.running.values()))
            self._retract(victim)
            if victim is request:
                return False
        request.pages += self.pages.take(1)
        return True

    def _retract(self, request: Request) -> None:
        """Take slot and pages from a running request; it keeps its tokens and queues up again.

        Tokens in flight stay valid (the fence keeps their KV alive) and are committed as they resolve.
        """
        del self.running[request.key]
        self._give_back(request)
        request.state = RequestState.WAITING
        request.computed = 0
        request.relay_ready = False
        request.retractions += 1
        self.waiting.put_back(request)
        self.queued_tokens += request.length
        self.counters.retractions += 1

    def _give_back(self, request: Request) -> None:
        """Sized by what was allocated, never by token counts."""
        self.pages.give(request.pages, request.last_step)
        self.slots.give((request.slot,), request.last_step)
        request.pages = []
        request.slot = 0

    # -- resolve --------------------------------------------------------------------------------

    def resolve(self, step: Step, tokens: Sequence[int]) -> list[Request]:
        """Commit a step's tokens (one entry per row); returns the requests that got one, in row order.

        A token for a request that ended meanwhile is dropped and counted.
        """
        self._resolved(step)
        advanced = []
        for row, token in zip(step.rows, tokens, strict=True):
            if not row.samples:
                continue
            request = row.request
            if request.finished:
                request.pending -= 1
                self.counters.late_tokens += 1
                continue
            advanced.append(request)
            if token == BAD_LOGITS:
                self.finish(request, "abort", FloatingPointError("the model gave no finite logits"))
                request.pending -= 1
                continue
            request.pending -= 1
            request.output_ids.append(token)
            if token in request.stop_ids:
                request.stop_reason = token
                self.finish(request, "stop")
            elif len(request.prompt_ids) + len(request.output_ids) >= request.max_length:
                self.finish(request, "length")
        return advanced

    def fail(self, step: Step, error: BaseException) -> list[Request]:
        """A step raised: its own requests end with ``error``, all others go on."""
        self._resolved(step)
        failed = []
        for row in step.rows:
            if self.finish(row.request, "abort", error):
                failed.append(row.request)
            if row.samples:
                row.request.pending -= 1
        return failed

    def _resolved(self, step: Step) -> None:
        self.pages.resolved(step.id)
        self.slots.resolved(step.id)

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert conservation of pages and slots, in O(1)."""
        self.pages.check()
        self.slots.check()
        assert self.slots.private == len(self.running)

    def audit(self) -> None:
        """Assert by walking that every page and slot is where it should be."""
        requests = self.running.values()
        self.pages.audit(page for request in requests for page in request.pages)
        self.slots.audit(request.slot for request in requests)
        assert self.queued_tokens == sum(request.length for request in self.waiting)


def _wants_decode(request: Request) -> bool:
    """Its prompt is computed, and its last token by length is not being computed already."""
    return request.relay_ready and request.length < request.max_length
