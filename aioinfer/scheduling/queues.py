"""RequestQueues: where each request is, and how it gets from one place to the next.

::

                 submit                admitted                       last token planned
    (new) ──► waiting ─────► running: prefilling ──► batch ──────────► (neither)
                 ▲  ▲                 │ retracted, or its step failed
                 │  └─────────────────┤
          unpark └──── shelved ◄──────┘ the same, while it is parked

:meth:`RequestQueues.finish` leads from each of them to the end.
"""

from __future__ import annotations

import contextlib
from collections import abc
from collections.abc import Callable, Collection
from typing import Protocol

from aioinfer.budget import TokenBudget
from aioinfer.outputs import FinishReason
from aioinfer.scheduling.admission import PrefixLeaders
from aioinfer.scheduling.arrivals import Arrival
from aioinfer.scheduling.counters import SchedulerCounters
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import Policy, PolicyFailed
from aioinfer.scheduling.sequence import ParkedFor, Sequence, SequenceState
from aioinfer.scheduling.step import Generating, MultiStepBudget, Outcome, Row, Step

__all__ = ["RequestQueues", "RunningBatch"]


class RunningBatch(Protocol):
    """The requests that generate, and what differs between tokens and blocks in a step: which rows they get,
    and what a resolved row means. Implemented by TokenBatch and BlockBatch."""

    #: positions of a unit of generation: 1, or those of a block
    unit: int
    #: prompts are cut into multiples of so many positions
    grain: int
    #: the newest launched step with rows of this batch
    last_step: int

    @property
    def locked(self) -> bool:
        """Only the requests of the batch may have rows in the next step."""

    @property
    def sequences(self) -> abc.Sequence[Sequence]: ...

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """A request whose known tokens are all computed. No effect if it wants no more tokens."""

    def join(self, sequence: Sequence) -> None:
        """The step that is being planned has the last of a request's known tokens."""

    def planned(
        self, generating: Generating, prefilling: abc.Sequence[Row], queues: RequestQueues
    ) -> MultiStepBudget | None:
        """The step has these rows; returns how many forwards it may take, if it may take several."""

    def abandon(self, last_step: int) -> None:
        """Planning raised: no step has the rows that were begun after ``last_step``, and the requests that
        run end."""

    def remove(self, sequence: Sequence) -> None:
        """The request generates no more, for now or for good."""

    def out_of_pages(self) -> list[Sequence]:
        """Requests whose next row has no pages yet, eldest first."""

    def changed_pages(self, sequence: Sequence) -> None:
        """Pages were added to a request's table or exchanged in it."""

    def expected_tokens(self, clip: int) -> int:
        """Tokens that may still come, each request counted with at most ``clip``."""

    def longest_chunk(self, sequence: Sequence) -> int | None:
        """Positions that a prefill chunk of a request may have; None: no limit of its own."""

    def may_plan(self, *, in_flight: bool) -> bool:
        """Whether a step may be planned now, given whether one is in flight."""

    def launch(self, step_id: int, without: Collection[Sequence], most: int) -> Generating:
        """The rows of step ``step_id``, for all but ``without`` and ``most`` positions at most."""

    def resolve(self, step: Step, outcome: Outcome, queues: RequestQueues) -> list[Sequence]:
        """Commit what a step's rows brought; returns the requests that changed, in row order."""

    def timed(self, step: Step, seconds: float) -> None:
        """A step that has resolved took so long."""

    def audit(self) -> None:
        """Assert that every request in the batch is described correctly."""


class RequestQueues:
    """All requests that have not ended.

    A request that runs is in one of four places: ``arriving`` while its first pages are filled by something
    else than a step, ``prefilling`` while some of its known tokens are not planned, in the ``batch`` while it
    wants more tokens, or in none: parked, or waiting for its last token to be read.
    """

    __slots__ = (
        "arriving",
        "asked",
        "batch",
        "counters",
        "ended",
        "growing",
        "junk_until",
        "last_step",
        "leaders",
        "memory",
        "prefilling",
        "queued_tokens",
        "running",
        "sharing",
        "shelved",
        "timely",
        "waiting",
    )

    def __init__(
        self,
        memory: Memory,
        waiting: Policy,
        batch: RunningBatch,
        leaders: PrefixLeaders,
        ended: Callable[[Sequence], None],
    ) -> None:
        """``ended`` is called with each request that ran and has ended."""
        self.memory, self.ended = memory, ended
        self.waiting = waiting
        #: requests with slot and pages, in the order of admission
        self.running: dict[int, Sequence] = {}
        #: those of them that have an ``itl_target``
        self.timely: dict[int, Sequence] = {}
        self.arriving: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        #: of these, the ones whose pages do not hold all their known tokens: their grammar forced some
        self.growing: dict[int, Sequence] = {}
        self.batch = batch
        #: those whose logits processors are to be asked, until somebody does
        self.asked: list[Sequence] = []
        #: retracted requests that are parked
        self.shelved: dict[int, Sequence] = {}
        self.leaders = leaders
        #: by budget, the requests that share it
        self.sharing: dict[TokenBudget, dict[Sequence, None]] = {}
        #: tokens of the waiting requests
        self.queued_tokens = 0
        self.counters = SchedulerCounters()
        #: id of the newest step
        self.last_step = 0
        #: launched steps up to this one may hold rows that continue from where a step failed
        self.junk_until = 0

    # -- the life of a request -----------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a request whose prompt fits (``length < max_length``) and that was never queued.

        Raises PolicyFailed, and does not queue it, if the policy raises.
        """
        try:
            self._enqueue(sequence)
        except PolicyFailed:
            del self.shelved[sequence.key]
            raise

    def finish(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> bool:
        """End a request, whatever its state. The only way any request ends; True the first time.

        Its pages and slot come back when the last launched step that holds it has resolved.
        """
        if sequence.finished:
            return False
        ran = sequence.state is SequenceState.RUNNING
        if ran:
            self._leave(sequence)
        elif self.shelved.pop(sequence.key, None) is None:
            self._dequeue(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.output.finish(reason, error)
        sequence.output.make_draft = None  # it refers to the sequence
        budget = sequence.request.budget
        if budget is not None and (those := self.sharing.get(budget)) is not None:
            those.pop(sequence, None)
            if not those:
                del self.sharing[budget]
        self.counters.finished += 1
        if ran:
            self.ended(sequence)
            self.waiting.stopped(sequence)  # last: policies learn from how outputs end
        return True

    def park(self, sequence: Sequence, waits: ParkedFor = ParkedFor.READER) -> None:
        """Compute nothing for a request until :meth:`unpark` was called for all that it waits for. It keeps
        its pages while no other request needs them. If the policy raises, it is not parked."""
        if sequence.finished or waits in sequence.parked_for:
            return
        parked = sequence.parked
        sequence.parked_for |= {waits}
        if parked:
            return
        self.counters.parkings += 1
        if sequence.state is SequenceState.RUNNING:
            self._stop_computing(sequence)
        else:
            try:
                self._dequeue(sequence)
            except BaseException:
                sequence.parked_for -= {waits}
                raise
            self.shelved[sequence.key] = sequence

    def unpark(self, sequence: Sequence, waits: ParkedFor = ParkedFor.READER) -> None:
        """Go on where :meth:`park` stopped, if the request waits for nothing else."""
        if sequence.finished or waits not in sequence.parked_for:
            return
        sequence.parked_for -= {waits}
        if sequence.parked:
            return
        if sequence.state is SequenceState.WAITING:
            del self.shelved[sequence.key]
            self._enqueue(sequence)
        elif not sequence.cursor.relay_ready:
            self._prefill_rest(sequence)
            self.leaders.lead(sequence)
        else:
            self.batch.add(sequence)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.shelved or self.waiting)

    def unfinished(self) -> list[Sequence]:
        """Every request that has not ended."""
        return [*self.running.values(), *self.waiting, *self.shelved.values()]

    @property
    def has_prefill(self) -> bool:
        """Some known tokens are not planned yet."""
        return bool(self.prefilling or self.waiting)

    @property
    def has_work(self) -> bool:
        """Something wants to be computed. Parked requests do not."""
        return bool(self.batch or self.prefilling or self.waiting)

    # -- from place to place --------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        try:
            self.waiting.add(sequence)
        except Exception as error:
            with contextlib.suppress(Exception):
                self.waiting.remove(sequence)  # what there is of it
            # So that the request is found when those are ended that the error concerns.
            self.shelved[sequence.key] = sequence
            raise PolicyFailed.because(self.waiting, error) from error
        self.queued_tokens += sequence.length

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.queued_tokens -= sequence.length

    def _prefill_rest(self, sequence: Sequence) -> None:
        if sequence.kv.arrival is not None:
            return  # when that has landed
        self.prefilling[sequence.key] = sequence
        if len(sequence.kv.pages) < self.memory.pages.pages_for(sequence.length):
            self.growing[sequence.key] = sequence

    def _stop_computing(self, sequence: Sequence) -> None:
        self.prefilling.pop(sequence.key, None)
        self.growing.pop(sequence.key, None)
        self.leaders.leave(sequence)
        if self.memory.features is not None:
            self.memory.features.release(sequence)
        if sequence.cursor.in_batch:
            self.batch.remove(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """A waiting request has got its slot and its pages."""
        self._dequeue(sequence)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        if sequence.request.itl_target is not None:
            self.timely[sequence.key] = sequence
        self.prefilling[sequence.key] = sequence
        self.waiting.started(sequence)
        self.leaders.lead(sequence)
        if not sequence.recovery.retractions:
            sequence.output.cached_tokens = sequence.cursor.computed
        self.counters.admitted += 1

    def arrive(self, arrival: Arrival) -> None:
        """Pages of an admitted request are being filled: it is planned when they have landed."""
        sequence = self.prefilling.pop(arrival.key)
        sequence.kv.arrival = arrival
        self.arriving[arrival.key] = sequence

    def landed(self, arrival: Arrival, pages: int) -> None:
        """An arrival has ended, with its first ``pages`` filled; of one with a state all or none."""
        if arrival.abandoned:
            self.memory.reclaim(arrival)
            return
        sequence = self.arriving.pop(arrival.key)
        self.memory.arrived(sequence, pages)
        if not sequence.recovery.retractions:
            sequence.output.cached_tokens = sequence.cursor.computed
        if not sequence.parked:
            self._prefill_rest(sequence)
        self.share(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._stop_computing(sequence)
        self.arriving.pop(sequence.key, None)
        del self.running[sequence.key]
        self.timely.pop(sequence.key, None)
        self.memory.release(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Take slot and pages from a running request; it keeps its tokens and queues up again.

        Tokens in flight stay valid (the fence keeps their KV alive) and are committed as they resolve; rounds
        of blocks in flight do not. What is committed stays in the prefix cache while there is room for it.
        """
        self._leave(sequence)
        self.waiting.stopped(sequence)
        sequence.state = SequenceState.WAITING
        sequence.restart()
        sequence.recovery.retractions += 1
        self.counters.retractions += 1
        if not sequence.cursor.survives_retraction:
            sequence.recovery.void_until = self.last_step
        if sequence.parked:
            self.shelved[sequence.key] = sequence
        else:
            self._enqueue(sequence)

    def switch(self, version: int) -> None:
        """Other weights go on with every request, and none of them runs. Raises PolicyFailed."""
        # Policies may have sorted them by what is cached for them.
        waiting = [*self.waiting]
        for sequence in waiting:
            self._dequeue(sequence)
        for sequence in (*waiting, *self.shelved.values()):
            sequence.switch(version)
        self.memory.flush()
        failed: PolicyFailed | None = None
        for sequence in waiting:
            try:
                self._enqueue(sequence)
            except PolicyFailed as error:
                failed = error
        if failed is not None:
            raise failed

    def rewind(self, sequence: Sequence, computed: int) -> None:
        """Plan a request again from position ``computed``; what is in flight for it is void."""
        sequence.recovery.void_until = self.last_step
        if sequence.state is SequenceState.RUNNING:
            self._stop_computing(sequence)
            sequence.rewind(self.memory.rewind(sequence, computed))
            if not sequence.parked:
                self._prefill_rest(sequence)
        elif sequence.key in self.shelved:
            sequence.rewind(0)
        else:
            self._dequeue(sequence)
            sequence.rewind(0)
            self._enqueue(sequence)

    def shorten(self, sequence: Sequence, tokens: int) -> None:
        """Note that a launched row brought ``tokens`` less than it could have."""
        if sequence.state is SequenceState.WAITING and sequence.key not in self.shelved:
            self.queued_tokens -= tokens
        sequence.cursor.shorten(tokens)

    def start_over(self, sequence: Sequence) -> None:
        """A step that holds the request failed: what came of later ones is junk. It loses slot and pages,
        keeps the tokens that were read, and queues up again."""
        if sequence.state is SequenceState.RUNNING:
            self.retract(sequence)
        sequence.recovery.junk_until = self.last_step
        if sequence.grammar is not None:
            sequence.grammar = sequence.grammar.restarted(sequence.output_ids)
        if sequence.steering is not None:
            sequence.steering = sequence.steering.restarted(sequence.output_ids)
        self.rewind(sequence, 0)

    def ask(self, sequence: Sequence) -> None:
        """A row was computed, and its logits processors decide later how the request goes on: compute it once
        more then. See :mod:`aioinfer.loop.answers`."""
        self.rewind(sequence, sequence.known - 1)
        self.park(sequence, ParkedFor.ANSWER)
        self.asked.append(sequence)

    def take_asked(self) -> list[Sequence]:
        """The requests for which :meth:`ask` was called since the last call of this."""
        asked, self.asked = self.asked, []
        return asked

    # -- sharing --------------------------------------------------------------------------------

    def share(self, sequence: Sequence) -> None:
        """Offer the resolved pages of a running request to others: when a prefill chunk has resolved, or
        when somebody wants them."""
        cursor, fence = sequence.cursor, sequence.kv.last_step
        if cursor.in_batch:
            fence = max(fence, self.batch.last_step)
        if self.memory.commit(sequence, fence) and cursor.in_batch:
            self.batch.changed_pages(sequence)
        if cursor.prefilled or sequence.parked:
            self.leaders.leave(sequence)
        else:
            self.leaders.lead(sequence)
