"""The scheduler: which rows the next step has, and what a resolved step means.

Read :meth:`Scheduler.plan` first: generating rows, prefill chunks of admitted requests, admissions, all into
one packed step. :meth:`Scheduler.resolve` commits a step's results. Nothing here waits, knows the time or
touches a device; the same object runs under the engine, the synchronous LLM and the tests. Tokens and blocks
differ in the batch (:class:`~aioinfer.scheduling.queues.RunningBatch`) and in the requests' cursors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aioinfer.outputs import FinishReason
from aioinfer.scheduling.admission import Admitter, PrefixLeaders, StepBudget
from aioinfer.scheduling.budgets import Budgets
from aioinfer.scheduling.failures import Failures
from aioinfer.scheduling.faults import PlanFaults
from aioinfer.scheduling.forecast import Forecast
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import PolicyFailed, make_policy
from aioinfer.scheduling.queues import RequestQueues, RunningBatch
from aioinfer.scheduling.recovery import StepCap, Suspects, failed_before
from aioinfer.scheduling.reserve import NewTokenRatio, Outlook, Reserve
from aioinfer.scheduling.retraction import victims
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.step import NO_ROWS, Generating, Outcome, Row, Step, new_request_data
from aioinfer.scheduling.step_time import StepTime
from aioinfer.scheduling.token_batch import TokenBatch

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching of packed rows over paged KV.

    Steps are launched in the order in which :meth:`plan` returns them and resolved in the same order,
    each by exactly one call of :meth:`resolve`, :meth:`fail` or :meth:`run_out`.
    """

    __slots__ = (
        "_encoded_last",
        "_itl_target",
        "_newest_rows",
        "_prefilled_last",
        "_short",
        "_urgent",
        "_whole_prompts",
        "admitter",
        "budgets",
        "cap",
        "config",
        "failures",
        "faults",
        "forecast",
        "queues",
        "ratio",
        "suspects",
        "times",
        "weight_version",
    )

    def __init__(
        self,
        memory: Memory,
        config: EngineConfig,
        batch: RunningBatch | None = None,
        *,
        whole_prompts: bool = False,
        times: StepTime | None = None,
    ) -> None:
        """``config`` leaves nothing open that concerns scheduling. ``batch``: by default of tokens.
        ``whole_prompts``: a prompt is one row, never cut."""
        if batch is None:
            batch = TokenBatch(memory, config.running_requests)
        policy = make_policy(config.policy, memory, config.seed or 0)
        leaders = PrefixLeaders(memory, config.share_prefix_tokens)
        self.config = config
        self._whole_prompts = whole_prompts
        self.times = StepTime(config.itl_target or 0.0) if times is None else times
        self._itl_target = self.times.target
        self.ratio = NewTokenRatio(config)
        #: what new requests will take
        self.forecast = Forecast(config, memory, self.times, self.ratio)
        policy.plan_with(self.forecast)
        self.queues = RequestQueues(memory, policy, batch, leaders, self.forecast.ended)
        self.admitter = Admitter(self.queues.waiting, memory, leaders, config)
        self.cap = StepCap(config.step_tokens, least=batch.unit)
        #: requests that ended because planning raised for them
        self.faults = PlanFaults(self.queues)
        #: requests of steps that raised
        self.suspects = Suspects()
        #: what becomes of these
        self.failures = Failures(self.queues, self.cap, self.suspects)
        #: how often the weights were replaced
        self.weight_version = 0
        self.budgets = Budgets(self.queues)
        self._prefilled_last = self._encoded_last = False
        #: id of the newest step with rows
        self._newest_rows = 0
        #: a request lost pages while the current step was planned
        self._short = False
        #: the waiting request for which others were retracted
        self._urgent: Sequence | None = None

    @property
    def memory(self) -> Memory:
        return self.queues.memory

    # -- requests -------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a request whose prompt fits (``length < max_length``, or equal if it only prefills) and that
        was never queued."""
        if not self.queues.has_unfinished:
            self.ratio.reset()  # the load that it was learnt from is gone
        self.queues.submit(sequence)
        if sequence.request.budget is not None:
            self.budgets.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> bool:
        """End a request, whatever its state; True the first time."""
        return self.queues.finish(sequence, reason, error)

    def replace_weights(self, version: int) -> None:
        """Other weights are about to be installed, and no step is in flight: no KV of those before is
        found or read again. All requests that run are retracted."""
        queues = self.queues
        self.weight_version = version
        for sequence in [*queues.running.values()]:
            self.retract(sequence)
        if self.memory.features is not None:
            self.memory.features.forget()
        try:
            queues.switch(version)
        except PolicyFailed as error:
            self.faults.end(queues.waiting, error)

    # -- plan -----------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """The next step, or None if nothing can be computed before a launched step resolves.

        What raises for one request ends that request, and what raises in the queue's order ends those that
        wait: see ``faults``. After any other exception call :meth:`abandon_plan`.
        """
        queues = self.queues
        if not queues.batch.may_plan(in_flight=queues.last_step > queues.memory.pages.last_resolved):
            return None
        # Steps of the encoder take turns with others.
        if not self._encoded_last and (step := self._encode()) is not None:
            return step
        step = self._plan_rows()
        if step is None:
            # Rows may follow when those in flight have resolved: behind one step of the encoder.
            waits = self._encoded_last and self._newest_rows > queues.memory.pages.last_resolved
            return None if waits else self._encode()
        self._encoded_last, self._newest_rows = False, step.id
        return step

    def _encode(self) -> Step | None:
        """A step of the image encoder, if something wants one."""
        features, queues = self.memory.features, self.queues
        encoding = None if features is None else features.encode()
        self._encoded_last = encoding is not None
        if encoding is None:
            return None
        queues.last_step += 1
        queues.counters.steps += 1
        return Step(queues.last_step, NO_ROWS, (), 0, encoding=encoding)

    def _plan_rows(self) -> Step | None:
        config, queues, memory = self.config, self.queues, self.queues.memory
        budget = StepBudget(config, memory.pages.page_size, self.cap.tokens, queues.batch.grain)
        self._short = False
        if self.suspects and (suspect := self.suspects.next()) is not None:
            if queues.last_step > memory.pages.last_resolved:
                return None
            step = self._step(*self._alone(suspect, budget))
            if step is not None:
                return step
        try:
            self._preempt()
        except PolicyFailed as error:
            self.faults.end(queues.waiting, error)
        starved = self._grow()
        generating, prefilling = NO_ROWS, list[Row]()
        if queues.batch.locked:
            generating = self._generate(budget, starved)
        else:
            # Generating and prefilling rows share a step if they may mix. If not, they take turns.
            if config.step_priority == "decode" and (config.mixed or self._prefilled_last):
                generating = self._generate(budget, starved)
            if config.mixed or not generating:
                prefilling = self._prefill(budget, generating)
            if not generating and (config.mixed or not prefilling):
                generating = self._generate(budget, starved)
        return self._step(generating, prefilling)

    def _alone(self, suspect: Sequence, budget: StepBudget) -> tuple[Generating, list[Row]]:
        """The rows of one request, if it has what it needs; nothing is in flight."""
        queues = self.queues
        starved, prefilling = self._grow(), list[Row]()
        try:
            if suspect.state is SequenceState.WAITING and not queues.batch.locked:
                self._admit(suspect, 0)
            if suspect.key in queues.prefilling and suspect.key not in queues.growing:
                prefilling = self._chunk(suspect, budget)
        except Exception as error:
            self.faults.end([suspect], error)
        if prefilling or not suspect.cursor.in_batch:
            return NO_ROWS, prefilling
        others = [each for each in queues.batch.sequences if each is not suspect or each in starved]
        return self._generate(budget, others), prefilling

    def _step(self, generating: Generating, prefilling: list[Row]) -> Step | None:
        if not (generating or prefilling):
            return None
        queues = self.queues
        self._prefilled_last = bool(prefilling)
        multi_step = queues.batch.planned(generating, prefilling, queues)
        prefill_tokens = sum(len(row.ids) for row in prefilling) if prefilling else 0
        # Not what the budget lacks: a chunk for which planning raised was paid for and has no row.
        num_tokens = generating.num_tokens + sum(row.length for row in prefilling)
        counters = queues.counters
        counters.steps += 1
        counters.prefill_tokens += prefill_tokens
        counters.decode_tokens += num_tokens - prefill_tokens
        self.ratio.decay()
        step = Step(queues.last_step + 1, generating, tuple(prefilling), num_tokens, multi_step)
        queues.last_step = step.id
        self.forecast.planned(step, prefill_tokens)
        return step

    def abandon_plan(self, error: Exception, newest: int) -> bool:
        """After :meth:`plan` raised: end the requests that the step could have had, all that run; if none
        does, those that wait. All others go on. Returns whether there was any.

        ``newest``: id of the newest step that was returned.
        """
        queues = self.queues
        queues.last_step = newest
        self._newest_rows = min(self._newest_rows, newest)
        queues.batch.abandon(queues.last_step)
        self.faults.end(queues.running.values() or queues.waiting, error)
        return bool(self.faults)

    def _generate(self, budget: StepBudget, starved: list[Sequence]) -> Generating:
        """A token or block for every request in the batch, as far as the step holds them."""
        batch, most = self.queues.batch, max(0, budget.tokens)
        if self.config.max_decode_rows is not None:
            most = min(most, self.config.max_decode_rows * batch.unit)
        generating = batch.launch(self.queues.last_step + 1, starved, most)
        budget.spend_decodes(generating.num_tokens)
        return generating

    def _prefill(self, budget: StepBudget, generating: Generating) -> list[Row]:
        """Chunks of the prompts under way, then of those that are admitted: beside requests that generate,
        as far as there is time."""
        queues = self.queues
        self.times.target = self._itl_target if not queues.timely else self._least_itl_target()
        if self.times.target and (generating or len(queues.batch)):
            budget.bound(self.times, generating, queues.batch.unit * len(queues.batch))
        rows: list[Row] = []
        # Before the chunks: a request whose prompt ends in one is in neither place until the step is planned.
        reserve = self._reserve() if self._may_admit else None
        for sequence in list(queues.prefilling.values()):
            if budget.room() <= 0:
                return rows
            if sequence.key in queues.growing:
                continue
            try:
                rows += self._chunk(sequence, budget)
            except Exception as error:
                self.faults.end([sequence], error)
        if reserve is not None and not self._short:
            rows += self._admissions(budget, reserve)
        return rows

    def _least_itl_target(self) -> float:
        """The smallest target of the engine and of the requests that generate, 0 if there is none."""
        found = [each.request.itl_target for each in self.queues.timely.values() if each.cursor.relay_ready]
        return min([each for each in (self._itl_target, *found) if each], default=0.0)

    @property
    def _may_admit(self) -> bool:
        queues = self.queues
        full = len(queues.running) >= self.config.running_requests and not queues.counters.parkings
        return bool(queues.waiting) and not full

    def _admissions(self, budget: StepBudget, reserve: Reserve) -> Iterator[Row]:
        queues, memory = self.queues, self.queues.memory
        parked = sum(each.idle for each in queues.running.values()) if queues.counters.parkings else 0
        room = self.config.running_requests - len(queues.running) + parked
        if room <= 0 or budget.room() <= 0:
            return
        if not parked and memory.available <= reserve.pages():
            return  # not one page to give: no need to look into the queue
        admitted = False
        try:
            eldest = queues.waiting.eldest()
            chosen = self.admitter.choose(budget, room, Outlook(memory, reserve), self._urgent)
            if not (chosen or queues.running) and queues.waiting and self.admitter.head() is None:
                # Nothing would ever be planned again.
                raise LookupError(f"its order has none of the {len(queues.waiting)} requests that wait")
        except Exception as error:
            self.faults.end(queues.waiting, PolicyFailed.because(queues.waiting, error))
            return
        for sequence, most in chosen:
            if budget.room() <= 0 or failed_before(sequence):
                break  # a suspect is the next that is admitted: when it has its place alone
            if budget.beside <= 0 and self._beside_tokens(sequence, budget):
                continue  # it would have a slot and pages, and no row
            try:
                if not self._admit(sequence, reserve.pages(sequence)):
                    break
                admitted = True
                reserve.add(sequence)
                rows = [] if sequence.kv.arrival is not None else self._chunk(sequence, budget, most)
            except Exception as error:
                self.faults.end([sequence], error)
                continue
            # Once its rows are given away, the request cannot be ended apart from the step.
            yield from rows
        if not admitted or eldest is None or eldest not in queues.waiting:
            return
        if not queues.leaders.holds_back(eldest):
            eldest.passed += 1

    def _admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting request slot and pages, at the cost of parked requests if need be. ``spare``: pages
        that must be left."""
        queues = self.queues
        while True:
            free = len(queues.running) < self.config.running_requests
            if free and queues.memory.admit(sequence, spare):
                break
            victim = next(victims(queues.running.values()), None) if queues.counters.parkings else None
            if victim is None or not victim.idle:
                return False
            self.retract(victim)
        queues.admitted(sequence)
        finder, cached = queues.memory.finder, sequence.kv.cached_pages * queues.memory.pages.page_size
        # Nothing is read over what was copied for a fork.
        if finder is not None and sequence.cursor.computed <= cached and not failed_before(sequence):
            arrival = finder.find(sequence)
            if arrival is not None:
                queues.arrive(arrival)
        return True

    def retract(self, sequence: Sequence) -> None:
        """Take slot and pages from a running request, which queues up again."""
        try:
            self.queues.retract(sequence)
        except PolicyFailed as error:
            self.faults.end((), error)  # but for this request, which the policy did not queue

    def _chunk(self, sequence: Sequence, budget: StepBudget, most: int | None = None) -> list[Row]:
        """The prefill row of the next positions of an admitted request, if it needs one."""
        queues, cursor = self.queues, sequence.cursor
        longest = queues.batch.longest_chunk(sequence)
        if longest is not None:
            most = longest if most is None else min(most, longest)
        start, stop = cursor.computed, cursor.prefill_stop(mixed=self.config.mixed)
        if self.memory.states is not None:
            end = self.memory.states.stop(sequence, start, stop)
            if end is not None:
                most = end - start if most is None else min(most, end - start)
        beside = self._beside_tokens(sequence, budget)
        if beside:
            most = budget.beside if most is None else min(most, budget.beside)
        length = budget.chunk(start, stop - start, most) if start < stop else 0
        if self._whole_prompts and length < stop - start:
            # All of it or nothing; a step without any other row has room for the longest.
            length = stop - start if budget.untouched else 0
        features = self.memory.features
        if features is not None and length and sequence.output.images is not None:
            end = features.whole(sequence, start, start + length, budget.most_whole)
            length = features.stop(sequence, start, end) - start
        rows: list[Row] = []
        if length:
            budget.spend_prefill(start, length)
            budget.beside = max(0, budget.beside - length * beside)
            rows.append(self._row(sequence, start, length))
        if start + length == stop:
            cursor.relay_ready = True
            sequence.sampled_in = queues.last_step + 1
            del queues.prefilling[sequence.key]
            queues.batch.join(sequence)
        return rows

    def _beside_tokens(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Whether a request has no output of its own, and others wait for theirs: in this step, or next."""
        return sequence.cursor.only_prefills and (budget.generates or len(self.queues.batch) > 0)

    def _row(self, sequence: Sequence, start: int, length: int) -> Row:
        kv, cursor = sequence.kv, sequence.cursor
        kv.last_step = self.queues.last_step + 1
        data = new_request_data(sequence)
        known, samples, blocks = cursor.chunk(start, length)
        first, pages = kv.take_new_pages()
        ids = sequence.known_ids(start, start + known)
        scores = cursor.score(start + length)
        row = Row(sequence, kv.slot, start, length, ids, samples, pages, first, data, scores, blocks)
        row.pools = cursor.pool(start, start + length)
        if self.memory.features is not None and sequence.output.images is not None:
            row.features = self.memory.features.take(sequence, start, start + length)
        states = self.memory.states
        if states is not None:
            stop = start + length
            row.state_read, row.state_write = states.cells(
                sequence, start, stop, kv.last_step, last=samples or row.ends
            )
        return row

    # -- memory ---------------------------------------------------------------------------------

    def _reserve(self) -> Reserve:
        """Pages that are kept back for the running requests."""
        batch, clip = self.queues.batch, self.config.clip_new_tokens
        reserve = Reserve(self.memory, self.ratio.value, clip, len(batch), batch.expected_tokens(clip))
        for sequence in (*self.queues.prefilling.values(), *self.queues.arriving.values()):
            reserve.add(sequence)
        return reserve

    def _grow(self) -> list[Sequence]:
        """Give all requests the pages of their next positions; returns those that have to skip a step.

        Out of pages, a request is retracted. Not before pages that come back by themselves are counted:
        retracting for those would empty the engine for nothing.
        """
        queues, memory = self.queues, self.queues.memory
        starved = []
        short = queues.batch.out_of_pages()
        if queues.growing:
            short = sorted([*short, *queues.growing.values()], key=lambda sequence: sequence.key)
        growing = queues.growing
        for sequence in short:
            cursor, kv = sequence.cursor, sequence.kv
            pages = memory.pages.pages_for(cursor.length)
            # The request itself may be retracted for its own pages.
            while (cursor.in_batch or sequence.key in growing) and len(kv.pages) < pages:
                if memory.grow(sequence):
                    continue
                victim = None if memory.returning else self._victim()
                if victim is None:
                    self._short = True
                    starved.append(sequence)
                    break
                self.retract(victim)
                self._short = True
                self.ratio.rise()
            else:
                growing.pop(sequence.key, None)
                if cursor.in_batch:
                    queues.batch.changed_pages(sequence)
        return [sequence for sequence in starved if sequence.cursor.in_batch]

    def _victim(self) -> Sequence | None:
        return next(victims(self.queues.running.values()), None)

    def _preempt(self) -> None:
        """Retract requests of lower priority until the first in the queue has, or will have, its place;
        none of them if all together are not enough.

        No other request is admitted before it then: a victim that queues up in front of it would take its
        place back and be retracted again, step after step.
        """
        queues = self.queues
        urgent, self._urgent = self._urgent, None
        if not self.config.preemption or not queues.waiting:
            return
        try:
            first = self.admitter.head()
        except Exception as error:
            raise PolicyFailed.because(queues.waiting, error) from error
        assert first is not None
        if urgent is not None and urgent in queues.waiting and urgent.priority >= first.priority:
            self._urgent = first = urgent
        if queues.leaders.holds_back(first):
            return  # it waits for another request's prefix
        if first.pending:
            return
        for victim in self._make_room(first):
            self._urgent = first
            self.retract(victim)
            queues.counters.preemptions += 1

    def _make_room(self, first: Sequence) -> list[Sequence]:
        """The requests to retract so that ``first`` has its place."""
        queues, memory = self.queues, self.queues.memory
        reserve = self._reserve()
        chosen: list[Sequence] = []
        order, gained = victims(queues.running.values()), 0
        while len(queues.running) - len(chosen) >= self.config.running_requests or not memory.fits(
            first, reserve.pages(first) - gained
        ):
            victim = next(order, None)
            if victim is None or victim.priority >= first.priority:
                return []
            chosen.append(victim)
            gained += len(victim.kv.pages)
            if victim.cursor.in_batch or victim.key in queues.prefilling or victim.key in queues.arriving:
                reserve.discount(victim)
        return chosen

    # -- resolve --------------------------------------------------------------------------------

    def resolve(self, step: Step, outcome: Outcome) -> list[Sequence]:
        """Commit what a step brought; returns the requests that changed, in row order.

        What comes for a request that ended meanwhile is dropped and counted.
        """
        self.memory.resolved(step.id)
        self.cap.fitted()
        changed = self.queues.batch.resolve(step, outcome, self.queues)
        return self.budgets.charge(changed) if self.budgets.counts else changed

    def fail(self, step: Step, error: BaseException) -> list[Sequence]:
        """A step raised; returns the requests that ended with ``error``. See
        :class:`~aioinfer.scheduling.failures.Failures`."""
        return self.failures.fail(step, error)

    def run_out(self, step: Step, error: BaseException) -> list[Sequence]:
        """The memory did not suffice for a step; returns as :meth:`fail` does."""
        return self.failures.run_out(step, error)
