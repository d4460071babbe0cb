"""GrammarWorker: computes the masks of grammars while the device computes the next forward.

::

    launch thread   ── sample N ──┐                 forward N+1 ──── collect ─ sample N+1 ─►
    mask thread                   └─ accept, fill the masks of all rows ─┘

Sampling waits for the mask of exactly that request and position, and only steps with such rows wait. It
does not wait for ever: a row whose mask is late is left out (``DEFERRED``), and comes again as soon as the
scheduler has heard of it. A grammar that leaves no choice for several tokens has them taken at once
(``FORCED``). Either way the rows launched after it have no input and are void.

A row that verifies drafts needs a mask for each of its positions. They are worked out on a copy of the
matcher while the forward runs; where they are not there in time, or the grammar does not allow a draft, the
row samples at fewer positions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aioinfer.execution.workers import Workers
from aioinfer.sampling.outcomes import BAD_GRAMMAR, DEFERRED, FORCED
from aioinfer.system.cores import usable_cores
from aioinfer.text.grammar import GrammarState, LookAhead

__all__ = ["Constraints", "GrammarRow", "GrammarWorker", "WorkerCall"]

#: a grammar's state and the tokens it goes on with: nearly always one
_Tokens = tuple[GrammarState, Sequence[int]]
#: threads at most, and grammars that may hang before others are delayed
_MOST_THREADS = 4
_NONE: Mapping[int, Sequence[int]] = {}


class GrammarRow(NamedTuple):
    """A row of a step whose request has a grammar."""

    #: among the rows that sample
    at: int
    state: GrammarState
    #: of the token to sample
    position: int
    #: the row's own tokens come from the host and not from a row before it
    known: bool
    #: tokens that the row verifies, from ``position`` on: it samples after each of them, too
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class Constraints:
    """Masks and outcomes of the grammars of a step."""

    #: int32 [M, words]: the masks of each row's positions in order; those of rows that do not
    #: sample allow everything
    masks: npt.NDArray[np.int32]
    #: [M], among the rows that sample
    at: list[int]
    #: of each row that verifies drafts, how many of its positions may sample
    usable: dict[int, int] = field(default_factory=dict)
    #: among the rows that sample: what stands for their token
    outcomes: dict[int, int] = field(default_factory=dict)
    #: the tokens of those that are ``FORCED``
    forced: dict[int, list[int]] = field(default_factory=dict)


class WorkerCall(Protocol):
    """Other work on grammars."""

    def run(self) -> None:
        """Do it, on a worker thread. Does not raise."""

    def fail(self, error: BaseException) -> None:
        """The thread that had it has ended."""


class GrammarWorker:
    """The grammars of one device. Threads start with the first grammar.

    ``patience``: seconds that a step waits, after its forward, for masks that are late. A grammar that
    takes longer is slow: until it has been quick again it works apart from the others, on at most half of the
    cores, and no step waits for it.
    """

    def __init__(self, patience: float = 0.01, *, threaded: bool = True) -> None:
        self.patience = patience
        self._changed = threading.Condition()
        self._threaded = threaded
        self._workers = Workers("aioinfer-masks", _MOST_THREADS, self._work, self._fail)
        most = max(1, min(_MOST_THREADS, usable_cores() // 2))
        self._slow_workers = Workers("aioinfer-masks-slow", most, self._work, self._fail)
        #: work in progress
        self._batches: list[_Batch] = []

    def advance(
        self, rows: Sequence[GrammarRow], tokens: Sequence[int], given: Mapping[int, Sequence[int]] = _NONE
    ) -> None:
        """These rows sampled these ``tokens`` (of all sampling rows), or were ``given`` some: prepare the
        masks that follow."""
        work: list[_Tokens] = []
        for row in rows:
            if row.at in given:
                work.append((row.state, given[row.at]))
                continue
            # After the first draft that was wrong there are outcomes.
            found = [token for token in tokens[row.at : row.at + 1 + len(row.drafts)] if token >= 0]
            if found:
                work.append((row.state, found))
        self._put(work)

    def skip(self, rows: Sequence[GrammarRow], outcomes: Mapping[int, int]) -> None:
        """Something else than their grammars has kept rows with these ``outcomes`` from sampling."""
        with self._changed:
            for row in rows:
                if row.at in outcomes:
                    row.state.unsampled = True

    def look_ahead(self, rows: Sequence[GrammarRow]) -> None:
        """Compute the masks after the drafts of these rows, as soon as their states are that far."""
        states: list[GrammarState] = []
        with self._changed:
            for row in rows:
                ahead = row.state.ahead
                if not row.drafts or (ahead is not None and ahead.position == row.position):
                    continue
                row.state.ahead = LookAhead(row.position, row.drafts)
                if not row.state.at_work:
                    states.append(row.state)
        if states and self._threaded:
            self._workers.put(_Batch([], ahead=states))
        else:
            self._look_ahead(states)

    def _put(self, work: list[_Tokens]) -> None:
        for state, _ in work:
            state.at_work = True
        if not self._threaded:
            self._work(_Batch(work))
            return
        # Told apart before the first is handed over: a worker that is done may find its states slow.
        quick = [tokens for tokens in work if not tokens[0].slow]
        slow = [tokens for tokens in work if tokens[0].slow]
        if quick:
            self._workers.put(_Batch(quick))
        for tokens in slow:
            self._slow_workers.put(_Batch([tokens]))

    def collect(self, rows: Sequence[GrammarRow], sampling: int) -> Constraints:
        """The masks of ``rows``, for a step of which ``sampling`` rows sample; waits for them, in reason."""
        if behind := [row.state for row in rows if row.state.missed is not None]:
            self._catch_up(behind)
        self.look_ahead(rows)
        count = sum(1 + len(row.drafts) for row in rows)
        found = Constraints(np.full((count, len(rows[0].state.mask)), -1, np.int32), [])
        with self._changed:
            valid = [row for row in rows if row.known or not row.state.unsampled]
            self._wait(valid, alone=len(valid) == sampling)
            for row in rows:
                first = len(found.at)
                self._decide(row, first, found)
                found.at += range(row.at, row.at + 1 + len(row.drafts))
                if row.drafts:
                    self._decide_drafts(row, first, found)
        return found

    def call(self, call: WorkerCall, *, slow: bool) -> None:
        """Have a thread run this; ``slow``: apart from the others."""
        if self._threaded:
            (self._slow_workers if slow else self._workers).put(_Batch([], call=call))
        else:
            call.run()

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        for thread in self._workers.close() + self._slow_workers.close():
            thread.join()

    def _catch_up(self, states: Sequence[GrammarState]) -> None:
        """These have missed what there is of their output: have them accept it, like any token."""
        work: list[_Tokens] = []
        for state in states:
            if state.missed is not None:
                work.append((state, state.missed))
                state.missed = None
        self._put(work)

    def _wait(self, rows: list[GrammarRow], *, alone: bool) -> None:
        """Wait until the masks of ``rows`` are there, but not longer than the patience allows."""
        late = [row.state for row in rows if row.state.at_work]
        prompt = [state for state in late if not state.slow]
        if prompt and not self._changed.wait_for(
            lambda: not any(state.at_work for state in prompt), self.patience
        ):
            for state in prompt:
                state.slow = state.at_work
            self._rescue()
        drafted = [row.state for row in rows if row.drafts and not row.state.slow]
        looking = [state.ahead for state in drafted if state.ahead is not None]
        if looking:
            # Without them only the first positions of these rows count.
            self._changed.wait_for(lambda: all(ahead.masks is not None for ahead in looking), self.patience)
        if alone and late and len(late) == len(rows):
            # Without any of them the step would be for nothing. But others may have come by now.
            self._changed.wait_for(lambda: not all(state.at_work for state in late), self.patience)

    def _rescue(self) -> None:
        """Take work away from threads that are stuck, all but what they are stuck in."""
        for batch in self._batches:
            if batch.tokens or batch.accepted:
                self._workers.put(_Batch(list(batch.tokens), list(batch.accepted)))
                batch.tokens.clear()
                batch.accepted.clear()

    def _decide(self, row: GrammarRow, index: int, found: Constraints) -> None:
        state = row.state
        void = state.unsampled and not row.known
        state.unsampled = False
        if void or state.at_work:
            found.outcomes[row.at] = DEFERRED
            state.unsampled = True
        elif state.forced and state.position == row.position + len(state.forced):
            # Also where nothing can follow them: they may hold the end of the output.
            found.outcomes[row.at], found.forced[row.at] = FORCED, state.forced
            state.forced, state.unsampled = [], True
        elif state.failed is not None:
            found.outcomes[row.at] = BAD_GRAMMAR
        elif state.position < row.position:
            found.outcomes[row.at] = DEFERRED
            state.unsampled = True
        elif state.position > row.position:
            state.fail(f"its grammar is at position {state.position}, not {row.position}")
            found.outcomes[row.at] = BAD_GRAMMAR
        else:
            found.masks[index] = state.mask

    def _decide_drafts(self, row: GrammarRow, first: int, found: Constraints) -> None:
        """Set the masks after the first one of a row."""
        ahead, row.state.ahead = row.state.ahead, None
        masks: Sequence[npt.NDArray[np.int32]] = ()
        if row.at not in found.outcomes and ahead is not None and ahead.position == row.position:
            masks = ahead.masks or ()
        for offset, mask in enumerate(masks, 1):
            found.masks[first + offset] = mask
        found.usable[row.at] = 1 + len(masks)

    def _look_ahead(self, states: Sequence[GrammarState]) -> None:
        for state in states:
            ahead = state.ahead
            masks = [] if ahead is None else state.look_ahead(ahead)
            with self._changed:
                if ahead is not None:
                    ahead.masks = masks
                self._changed.notify_all()

    def _work(self, batch: _Batch) -> None:
        """Accept tokens and fill masks, one call for all rows of a step with the same backend."""
        if batch.call is not None:
            batch.call.run()
            return
        if batch.ahead:
            self._look_ahead(batch.ahead)
            return
        start, used, rows = time.monotonic(), time.thread_time(), len(batch.tokens) + len(batch.accepted)
        position = sum(state.position for state in batch.states)
        with self._changed:
            self._batches.append(batch)
        while (states := self._accept(batch)) is None:
            pass
        masks = _advanced(states)
        slow = time.monotonic() - start > self.patience * rows
        if len(batch.states) == 1:  # as slow ones always are
            (state,) = batch.states
            state.charge(time.thread_time() - used, state.position - position)
        with self._changed:
            for state in states:
                if state.failed is None:
                    state.mask = masks[id(state)]
                    # A limit that was reached may leave the end tokens allowed; that is no end.
                    if (wrong := state.matcher.error) is not None:
                        state.failed = wrong
                    elif not state.mask.any():
                        state.failed = state.dead_end
                state.slow = slow
                state.at_work = False
            ahead = [each for each in states if each.ahead is not None and each.ahead.masks is None]
            self._changed.notify_all()
        self._look_ahead(ahead)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        """The thread that had this work has ended: so do the requests whose masks it was to compute."""
        if batch.call is not None:
            batch.call.fail(error)
            return
        with self._changed:
            if batch in self._batches:
                self._batches.remove(batch)
            for state in batch.ahead:
                if state.ahead is not None:
                    state.ahead.masks = []
            for state in batch.states:
                if state.at_work:
                    state.fail(f"the thread of its grammar ended: {error!r}")
                    state.at_work = False
            self._changed.notify_all()

    def _accept(self, batch: _Batch) -> list[GrammarState] | None:
        """Accept the next token; if there is none, the states whose masks are to be filled."""
        with self._changed:
            if not batch.tokens:
                self._batches.remove(batch)
                return batch.accepted
            state, tokens = batch.tokens.popleft()
        state.accept(tokens)
        with self._changed:
            batch.accepted.append(state)
        return None


class _Batch:
    """Tokens for one thread to accept, with their states, and states for it to fill the masks of. Another
    thread may take them away, until this one has begun with the masks."""

    __slots__ = ("accepted", "ahead", "call", "states", "tokens")

    def __init__(
        self,
        tokens: list[_Tokens],
        accepted: list[GrammarState] | None = None,
        ahead: Sequence[GrammarState] = (),
        call: WorkerCall | None = None,
    ) -> None:
        """``ahead``: states whose drafts are to be looked at, and nothing else; ``call``: what is to be run
        instead."""
        self.ahead = ahead
        self.call = call
        self.tokens = deque(tokens)
        self.accepted: list[GrammarState] = [] if accepted is None else accepted
        #: all that the batch began with
        self.states = [*self.accepted, *(state for state, _ in tokens)]


def _advanced(states: list[GrammarState]) -> dict[int, npt.NDArray[np.int32]]:
    """The masks after the tokens that the grammars force, by the ids of the states that have not failed."""
    began = time.monotonic()
    masks = _fill([state for state in states if state.failed is None])
    seconds = time.monotonic() - began
    followed = [state for state in states if id(state) in masks and state.follow(masks[id(state)], seconds)]
    return masks | _fill([state for state in followed if state.failed is None])


def _fill(states: list[GrammarState]) -> dict[int, npt.NDArray[np.int32]]:
    """The masks of ``states``, by their ids; what raises fails all with the same backend."""
    groups: dict[int, list[GrammarState]] = {}
    for state in states:
        groups.setdefault(id(state.backend), []).append(state)
    masks: dict[int, npt.NDArray[np.int32]] = {}
    for group in groups.values():
        fresh = [np.zeros_like(state.mask) for state in group]
        try:
            group[0].backend.fill([state.matcher for state in group], fresh)
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            for state in group:
                state.fail(f"its grammar failed: {error}")
        for state, mask in zip(group, fresh, strict=True):
            state.restrict(mask)
            masks[id(state)] = mask
    return masks
