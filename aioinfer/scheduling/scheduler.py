"""The scheduler: who gets a row in the next step, and what a resolved step means.

Read :meth:`Scheduler.plan` first: decodes, prefill chunks of admitted requests, admissions, all into one
packed step. :meth:`Scheduler.resolve` commits a step's tokens. Nothing here waits, knows the time or
touches a device; the same object runs under the engine, the synchronous twin and the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from aioinfer.outputs import FinishReason
from aioinfer.sampling.outcomes import BAD_LOGITS, DEFERRED
from aioinfer.scheduling.admission import Admitter, Limits, NewTokenRatio, StepBudget
from aioinfer.scheduling.decode_batch import NO_DECODES, Decodes
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policies.fcfs import Fcfs
from aioinfer.scheduling.policy import Policy
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.recovery import StepCap, struck, without_junk
from aioinfer.scheduling.request import Request, RequestState
from aioinfer.scheduling.retraction import victims
from aioinfer.scheduling.step import Outcome, Row, Step, new_request_data

__all__ = ["Scheduler"]


#: longest prefill chunk of a request whose prompt's tokens are scored
_MAX_SCORED = 64
_NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})


class Scheduler(RequestQueues):
    """Continuous batching of packed rows over paged KV.

    Steps are launched in the order in which :meth:`plan` returns them and resolved in the same order,
    each by exactly one call of :meth:`resolve`, :meth:`fail` or :meth:`run_out`.
    """

    __slots__ = (
        "_junk_until",
        "_prefilled_last",
        "_short",
        "_urgent",
        "admitter",
        "cap",
        "limits",
        "ratio",
    )

    def __init__(self, memory: Memory, limits: Limits, policy: Policy | None = None) -> None:
        super().__init__(memory, limits, Fcfs(memory) if policy is None else policy)
        self.limits = limits
        self.admitter = Admitter(self.waiting, memory, self.leaders, limits)
        self.ratio = NewTokenRatio(limits)
        self.cap = StepCap(limits.max_step_tokens)
        #: launched steps up to this one may hold rows that go on from where a step failed
        self._junk_until = 0
        self._prefilled_last = False
        #: somebody lost pages while the current step was planned
        self._short = False
        #: the waiting request for which others were retracted
        self._urgent: Request | None = None

    # -- plan -----------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """The next step, or None if nothing can be computed before a launched step resolves."""
        limits = self.limits
        budget = StepBudget(limits, self.memory.pages.page_size, self.cap.tokens)
        self._short = False
        self._preempt()
        starved = self._grow()
        # Decodes and prefill share a step if they may mix. If not, decode-first lets them take turns.
        if limits.step_priority == "decode" and (limits.mixed or self._prefilled_last):
            decodes = self._decode(budget, starved)
            prefills = self._prefill(budget) if limits.mixed or not decodes else []
        else:
            prefills = self._prefill(budget)
            decodes = self._decode(budget, starved) if limits.mixed or not prefills else NO_DECODES
        if not (decodes or prefills):
            return None
        self.last_step += 1
        for row in prefills:
            row.request.last_step = self.last_step
            # Not before the decodes of this step are chosen: the token to decode is sampled in it.
            if row.samples and row.request.wants_tokens:
                self.batch.add(row.request)
        self._prefilled_last = bool(prefills)
        num_tokens = self.cap.tokens - budget.tokens
        self.counters.steps += 1
        self.counters.decode_tokens += len(decodes)
        self.counters.prefill_tokens += num_tokens - len(decodes)
        self.ratio.decay()
        return Step(self.last_step, decodes, tuple(prefills), num_tokens)

    def _decode(self, budget: StepBudget, starved: list[Request]) -> Decodes:
        """One token for everybody in the decode batch, as far as the step holds them."""
        most = budget.tokens
        if self.limits.max_decode_rows is not None:
            most = min(most, self.limits.max_decode_rows)
        decodes: Decodes = self.batch.launch(self.last_step + 1, starved, most)
        budget.spend_decodes(len(decodes))
        return decodes

    def _prefill(self, budget: StepBudget) -> list[Row]:
        """Chunks of the prompts under way, then of those that are let in."""
        rows: list[Row] = []
        # Before the chunks: whose prompt ends in one is in neither place until the step is planned.
        running = len(self.batch) + len(self.prefilling)
        reserve = self._expected_tokens() if self._may_admit else 0
        for request in list(self.prefilling.values()):
            if budget.room() <= 0:
                return rows
            if request.key not in self.growing:
                rows += self._chunk(request, budget)
        if not self._short:
            rows += self._admissions(budget, running, reserve)
        return rows

    @property
    def _may_admit(self) -> bool:
        full = len(self.running) >= self.limits.max_running_requests and not self.counters.parkings
        return bool(self.waiting) and not full

    def _admissions(self, budget: StepBudget, running: int, reserve: int) -> Iterator[Row]:
        parked = sum(request.parked for request in self.running.values()) if self.counters.parkings else 0
        room = self.limits.max_running_requests - len(self.running) + parked
        if room <= 0 or budget.room() <= 0 or not self._may_admit:
            return
        if not parked and self.memory.available <= self._pages_to_spare(running, reserve):
            return  # not a page for anybody: no need to look who waits
        eldest, admitted = self.waiting.eldest(), False
        chosen, strict = self.admitter.choose(budget, room, self._urgent)
        for request, most in chosen:
            if budget.room() <= 0:
                break
            if self._admit(request, running, reserve):
                admitted = True
                running += 1
                reserve += self._may_generate(request)
                yield from self._chunk(request, budget, most)
            elif strict:
                break
        if admitted and eldest is not None and eldest in self.waiting:
            eldest.passed += 1

    def _admit(self, request: Request, running: int, reserve: int) -> bool:
        """Give a waiting request slot and pages, at the cost of parked requests if need be."""
        spare = self._pages_to_spare(running, reserve + self._may_generate(request))
        while True:
            if len(self.running) < self.limits.max_running_requests and self.memory.admit(request, spare):
                break
            victim = next((each for each in self.running.values() if each.parked), None)
            if victim is None:
                return False
            self._retract(victim)
        self._dequeue(request)
        request.state = RequestState.RUNNING
        self.running[request.key] = request
        self.prefilling[request.key] = request
        self.waiting.started(request)
        self.leaders.lead(request)
        if not request.retractions:
            request.cached_tokens = request.computed
        self.counters.admitted += 1
        return True

    def _chunk(self, request: Request, budget: StepBudget, most: int | None = None) -> list[Row]:
        """The prefill row of the next positions of an admitted request, if there is room for one."""
        start = request.computed
        if request.params.prompt_logprobs is not None:
            # Logits of every position take room: a little at a time.
            most = _MAX_SCORED if most is None else min(most, _MAX_SCORED)
        length = budget.chunk(start, request.length - start, most)
        budget.spend_prefill(length)
        row = Row(
            request=request,
            slot=request.slot,
            start=start,
            length=length,
            ids=request.known_ids(start, start + length),
            samples=start + length == request.length,
            new_pages=request.pages[request.sent_pages :],
            first_new_page=request.sent_pages,
            admission=new_request_data(request),
        )
        if request.params.prompt_logprobs is not None:
            row.scores = self._score(request, row.kv_length)
        request.sent_pages = len(request.pages)
        request.advance(row.kv_length, len(request.output_ids) + row.samples)
        if row.samples:
            request.relay_ready = True
            del self.prefilling[request.key]
        return [row]

    def _score(self, request: Request, stop: int) -> tuple[int, int] | None:
        """Positions up to ``stop`` whose next token in the prompt was not scored yet."""
        first, last = request.scored, min(stop, len(request.prompt_ids) - 1)
        request.scored = max(first, last)
        return (first, last) if first < last else None

    # -- memory ---------------------------------------------------------------------------------

    def _expected_tokens(self) -> int:
        """Tokens that the running requests may still generate, each one's clipped."""
        return self.batch.expected_tokens(self.limits.clip_new_tokens) + sum(
            self._may_generate(request) for request in self.prefilling.values()
        )

    def _may_generate(self, request: Request) -> int:
        return max(0, min(request.max_length - request.length, self.limits.clip_new_tokens))

    def _pages_to_spare(self, running: int, tokens: int) -> int:
        """Pages that an admission leaves to the growth of all. An empty engine admits whatever fits."""
        if not running:
            return 0
        return max(running, self.memory.pages.pages_for(int(tokens * self.ratio.value)))

    def _grow(self) -> list[Request]:
        """Make sure that everybody's next positions have their pages; returns those who have to skip a step.

        Out of pages, somebody is retracted. Not before pages that come back by themselves are counted:
        retracting for those would empty the engine for nothing.
        """
        starved = []
        short = self.batch.out_of_pages()
        if self.growing:
            short = sorted([*short, *self.growing.values()], key=lambda request: request.key)
        for request in short:
            pages = self.memory.pages.pages_for(request.length)
            while self._wants_pages(request) and len(request.pages) < pages:
                if self.memory.grow(request):
                    continue
                victim = None if self.memory.returning else self._victim()
                if victim is None:
                    self._short = True
                    starved.append(request)
                    break
                self._retract(victim)
                self._short = True
                self.ratio.rise()
            else:
                self.growing.pop(request.key, None)
                if request.batch is not None:
                    self.batch.changed_pages(request)
        return [request for request in starved if request.batch is not None]

    def _wants_pages(self, request: Request) -> bool:
        return request.batch is not None or request.key in self.growing

    def _victim(self) -> Request | None:
        return next(victims(self.running.values()), None)

    def _preempt(self) -> None:
        """Retract requests of lower priority until the first in the queue has, or will have, its place;
        none of them if all together are not enough.

        Nobody else is admitted before it then: a victim that queues up in front of it would take its place
        back and be retracted again, step after step.
        """
        urgent, self._urgent = self._urgent, None
        if not self.limits.preemption or not self.waiting:
            return
        first = next(self.waiting.order())
        if urgent is not None and urgent in self.waiting and urgent.priority >= first.priority:
            self._urgent = first = urgent
        if self.leaders.mark(first) in self.leaders:
            return  # it waits for somebody's prefix
        if first.pending:
            return
        for victim in self._make_room(first):
            self._urgent = first
            self._retract(victim)
            self.counters.preemptions += 1

    def _make_room(self, first: Request) -> list[Request]:
        """Whom to retract so that ``first`` has its place."""
        running = len(self.batch) + len(self.prefilling)
        tokens = self._expected_tokens() + self._may_generate(first)
        chosen: list[Request] = []
        order, gained = victims(self.running.values()), 0
        while len(self.running) - len(chosen) >= self.limits.max_running_requests or not self.memory.fits(
            first, self._pages_to_spare(running, tokens) - gained
        ):
            victim = next(order, None)
            if victim is None or victim.priority >= first.priority:
                return []
            chosen.append(victim)
            gained += len(victim.pages)
            if victim.batch is not None or victim.key in self.prefilling:
                running -= 1
                tokens -= self._may_generate(victim)
        return chosen

    # -- resolve --------------------------------------------------------------------------------

    def land(self, step: Step, outcome: Outcome) -> list[Request]:
        """Commit what came of a step; returns the requests that moved, in row order."""
        return self.resolve(step, outcome.tokens, outcome.forced)

    def resolve(
        self, step: Step, tokens: Sequence[int], forced: Mapping[int, Sequence[int]] = _NOTHING
    ) -> list[Request]:
        """Commit a step's tokens (one entry per row); returns the requests that moved, in row order.

        ``forced`` has the tokens of rows that got more than one, by row. What comes for a request that
        ended meanwhile is dropped and counted.
        """
        self.memory.resolved(step.id)
        self.cap.fitted()
        if step.id <= self._junk_until:
            tokens = without_junk(step, tokens)
        advanced: list[Request] = []
        for index, (request, token) in enumerate(zip(step.decodes.requests, tokens, strict=False)):
            if request.state is RequestState.FINISHED:
                self.counters.late_tokens += 1
            elif token < 0:
                advanced += self._unsampled(request, step, token, forced.get(index, ()))
            else:
                advanced.append(request)
                request.output_ids.append(token)
                if token in request.stop_ids:
                    self._stop(request, token)
        for request in step.decodes.ending:
            if request.known >= request.max_length:
                self.finish(request, "length")
        for index, row in enumerate(step.prefills, len(step.decodes)):
            if row.request.finished:
                self.counters.late_tokens += row.samples
            else:
                advanced += self._resolve_prefill(step, row, tokens[index], forced.get(index, ()))
        return advanced

    def _resolve_prefill(self, step: Step, row: Row, token: int, forced: Sequence[int]) -> Sequence[Request]:
        request = row.request
        moved: Sequence[Request] = (request,) if row.samples else ()
        if row.samples and token >= 0:
            request.output_ids.append(token)
        # A request that was retracted meanwhile has lost this slot, and cannot have it again yet.
        stayed = row.slot == request.slot
        if stayed:
            request.commit_prefill(row.kv_length, last=row.samples)
        if row.samples and token < 0:
            moved = self._unsampled(request, step, token, forced)
        elif row.samples and token in request.stop_ids:
            self._stop(request, token)
        elif row.samples and request.known >= request.max_length:
            self.finish(request, "length")
        # It may have been retracted just now.
        if stayed and request.state is RequestState.RUNNING:
            self._share(request)
        return moved

    def _share(self, request: Request) -> None:
        """A prefill chunk has resolved: offer its pages to others."""
        fence = request.last_step if request.batch is None else self.batch.last_step
        if self.memory.commit(request, max(fence, request.last_step)) and request.batch is not None:
            self.batch.changed_pages(request)
        if request.prefilled or request.parked:
            self.leaders.leave(request)
        else:
            self.leaders.lead(request)

    def _stop(self, request: Request, token: int) -> None:
        """The newest token of a request ends it."""
        request.stop_reason = token
        self.finish(request, "stop")

    def _unsampled(
        self, request: Request, step: Step, token: int, forced: Sequence[int]
    ) -> Sequence[Request]:
        """A row sampled no token: its request ends, or goes on from tokens that the host knows."""
        if token > DEFERRED:
            if token == BAD_LOGITS:
                self.memory.distrust(request)
                error: Exception = FloatingPointError("the model gave no finite logits")
            else:
                reason = None if request.grammar is None else request.grammar.failed
                error = ValueError(reason or "its grammar allows no token")
            self.finish(request, "abort", error)
            return (request,)
        if step.id <= request.void_until:
            return ()
        self.counters.deferred_rows += 1
        computed = request.known
        ended = self._append(request, forced)
        self.counters.forced_tokens += request.known - computed
        self._rewind(request, min(computed, request.known - 1))
        if ended is not None:
            self.finish(request, ended)
        return (request,) if forced else ()

    def _append(self, request: Request, tokens: Sequence[int]) -> FinishReason | None:
        """Tokens that nobody sampled, up to the one that ends the output, if one does."""
        return next((reason for token in tokens if (reason := request.append(token)) is not None), None)

    def fail(self, step: Step, error: BaseException) -> list[Request]:
        """A step raised: its own requests end with ``error``, all others go on."""
        self.memory.resolved(step.id)
        failed = []
        for request in step.requests:
            self.memory.distrust(request)
            if self.finish(request, "abort", error):
                failed.append(request)
        return failed

    def run_out(self, step: Step, error: BaseException) -> list[Request]:
        """The memory did not suffice for a step: its requests start over, in smaller steps.

        Of those to which that happened before, and which came no further since, one ends with ``error``: the
        longest, and of several who came last. Returns whoever ended.
        """
        self.memory.resolved(step.id)
        self.cap.ran_out(step, self.last_step)
        self._junk_until = self.last_step
        requests = struck(step)
        again = [request for request in requests if request.ran_out_at == request.progress]
        failed = sorted(again, key=lambda request: (request.known, request.key))[-1:]
        for request in failed:
            self.finish(request, "abort", error)
        for request in requests:
            if request.finished:
                continue
            request.ran_out_at = request.progress
            self.counters.out_of_memory_retries += 1
            self._start_over(request)
        return failed
