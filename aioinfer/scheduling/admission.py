"""Admission: which waiting requests get a slot next, and with how many tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import TYPE_CHECKING

from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import Policy
from aioinfer.scheduling.reserve import Outlook
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step_time import StepTime

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig
    from aioinfer.scheduling.step import Generating

__all__ = ["Admitter", "PrefixLeaders", "StepBudget"]


#: rows that kernels compute at a time: one more costs almost as much as so many
_ROWS = 8


class StepBudget:
    """Counts down the tokens of one step.

    The first prefill chunk of a step may exceed the prefill budget: ``chunk_size`` is what bounds it. With
    fifo it then goes alone; with packing it comes on top, and others that fit still ride along. What
    :meth:`bound` allows is never exceeded, but for one unit.
    """

    __slots__ = ("_chunk_size", "_decoding", "_most", "_on_top", "_page_size", "_seconds", "_times", "_unit",
                 "_untouched", "beside", "generates", "prefill", "tokens")  # fmt: skip

    def __init__(self, config: EngineConfig, page_size: int, tokens: int, unit: int = 1) -> None:
        """``unit``: what prompts are cut into multiples of, positions of a block for diffusion models."""
        self.tokens = self._most = tokens
        self._unit = unit
        #: of these, tokens for prefill
        self.prefill = tokens
        if config.max_prefill_tokens is not None:
            self.prefill = min(self.prefill, config.max_prefill_tokens)
        # A chunk size below the unit is taken for one.
        self._chunk_size = max(config.chunk_tokens, unit)
        #: tokens for requests that only prefill, where others generate: these wait for one chunk at most
        self.beside = self._chunk_size
        #: the step has rows that generate
        self.generates = False
        self._page_size = page_size
        self._on_top = config.admission == "pack"
        self._untouched = True
        self._times: StepTime | None = None
        self._seconds = 0.0
        #: seconds expected for other rows, until the step was counted as cut
        self._decoding: float | None = None

    def bound(self, times: StepTime, generating: Generating, tokens: int) -> None:
        """Prefill takes no longer than ``times`` allow beside rows that generate, or beside ``tokens`` that
        wait for a later step if there are no such rows in this one."""
        self._times, self._decoding = times, times.decoding(generating, tokens)
        self._seconds = times.left(self._decoding)

    @property
    def untouched(self) -> bool:
        """No prefill chunk was paid for."""
        return self._untouched

    @property
    def most_whole(self) -> int:
        """Tokens that the next chunk may have, if it cannot be cut: as the first one all that the step has
        left, and alone in it any number."""
        if not self._untouched:
            return 0
        return self.tokens if self.generates else sys.maxsize

    def room(self, start: int = 0) -> int:
        """Tokens that the next prefill chunk may have, from position ``start`` on."""
        return self.whole(min(self._allowed(), self._timely(start)))

    def _allowed(self) -> int:
        """The same, whatever time it takes."""
        prefill = max(self.prefill, self._chunk_size) if self._untouched else self.prefill
        return min(self.tokens, prefill, self._chunk_size)

    def _timely(self, start: int = 0) -> int:
        """Tokens from ``start`` on for which there is time: for the first prompt of a step at least a unit,
        and what kernels compute at a time; for another one a page at least, or none. Where they are many, no
        row is left over for kernels."""
        if self._times is None:
            return self.tokens
        tokens = self._times.fitting(start, self._seconds, self._most - self.tokens)
        if tokens >= 4 * _ROWS:
            tokens -= (self._most - self.tokens + tokens) % _ROWS
        if self._untouched:
            return max(tokens, self._unit, _ROWS)
        return tokens if tokens >= self._page_size else 0

    def left(self) -> int:
        """Tokens that further prefill chunks may have together; the first one may exceed it."""
        return min(self.tokens, self.prefill, self._timely())

    def whole(self, tokens: int) -> int:
        """Round a number of tokens down to whole units."""
        return tokens - tokens % self._unit

    def share(self, cost: int) -> int:
        """Number of the tokens to compute that one chunk may have."""
        return min(cost, self._chunk_size)

    def most(self) -> int:
        """Tokens that the prefill chunks of the step may have together, the first one included."""
        return max(self.room(), self.left())

    def holds(self, costs: Iterable[int]) -> bool:
        """Whether the step has room for a chunk of each of these requests."""
        return sum(min(cost, self._chunk_size) for cost in costs) <= self.left()

    def chunk(self, start: int, remaining: int, most: int | None = None) -> int:
        """Length of a prefill chunk from position ``start`` on. It ends at a page boundary, so that its
        pages can be shared, unless it is the last one, smaller than a page, or cut by :meth:`bound`."""
        wanted, timely = min(remaining, self._allowed()), self._timely(start)
        length = self.whole(min(wanted, timely, wanted if most is None else most))
        if self._times is not None and timely < wanted:
            if self._decoding is not None:
                self._times.cut(self._decoding)
                self._decoding = None
            return length
        aligned = (start + length) // self._page_size * self._page_size - start
        return aligned if aligned > 0 and length < remaining else length

    def spend_prefill(self, start: int, tokens: int) -> None:
        self.tokens -= tokens
        if self._times is not None:
            self._seconds -= self._times.prefill(start, tokens, self._most - self.tokens - tokens)
        if not (self._untouched and self._on_top and tokens > self.prefill):
            self.prefill -= tokens
        self._untouched = False

    def spend_decodes(self, tokens: int) -> None:
        self.generates = self.generates or tokens > 0
        # With these rows a step has as many tokens as one chunk; half of it at least, or others would starve.
        self.beside = max(self._chunk_size // 2, self.beside - tokens)
        self.tokens -= tokens
        self.prefill = min(self.prefill, self.tokens)


class PrefixLeaders:
    """In-batch sharing: the requests that compute a prefix which others wait for.

    A running request leads where its prefill goes beyond what is cached. A waiting one whose prefix is
    cached up to the same point and continues with the same ``tokens`` is held back until those are
    committed, and then finds them. Leaders always run, so no request is held for ever.
    """

    __slots__ = ("_leaders", "_marks", "_memory", "_pages")

    def __init__(self, memory: Memory, tokens: int) -> None:
        self._memory = memory
        self._pages = tokens // memory.pages.page_size if memory.tree is not None else 0
        self._leaders: dict[object, Sequence] = {}
        self._marks: dict[int, object] = {}

    def mark(self, sequence: Sequence) -> object | None:
        """The common prefix of two requests if one should wait for the other; None if not worth it."""
        if not self._pages or not sequence.kv.cacheable:
            return None
        hit, node = self._memory.shared(sequence)
        size = self._memory.pages.page_size
        stop = (hit + self._pages) * size
        if stop > sequence.cursor.reusable or (node is not None and node.detached):
            return None
        # The root of a namespace comes and goes while nothing is cached there.
        return (node if hit else sequence.namespace, hit, sequence.token_key(hit * size, stop))

    def lead(self, sequence: Sequence) -> None:
        """The request is computing from where its cached prefix ends; call again when that moves."""
        self.leave(sequence)
        mark = self.mark(sequence)
        if mark is not None and self._leaders.setdefault(mark, sequence) is sequence:
            self._marks[sequence.key] = mark

    def leave(self, sequence: Sequence) -> None:
        """It computes no prefix any more."""
        mark = self._marks.pop(sequence.key, None)
        if mark is not None:
            del self._leaders[mark]

    def get(self, mark: object) -> Sequence | None:
        """The running request that computes this; None if there is none."""
        return self._leaders.get(mark)

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether a waiting request is better off waiting for a running one's prefix."""
        mark = self.mark(sequence)
        return mark is not None and mark in self._leaders


class Admitter:
    """Chooses from the queue which requests are admitted next, and with how many tokens each.

    ``fifo`` takes requests in the policy's order until the step is full. ``pack`` differs where the tokens of
    the step are what is short, and only among requests that have equal rank and would all find a slot and
    pages: those that fit whole go in beside each other, cheapest first, and the first in order that does not
    gets what is left. So no request loses its place to another one.

    Two bounds keep requests from waiting for ever. Of the rounds that would pack, every
    ``force_fifo_every``-th is fifo. And when the eldest was passed over ``max_passed_over`` times, under
    either admission, it goes first.
    """

    __slots__ = (
        "_config",
        "_leaders",
        "_memory",
        "_policy",
        "_round",
        "forced_rounds",
        "held",
        "packed_rounds",
    )

    def __init__(self, policy: Policy, memory: Memory, leaders: PrefixLeaders, config: EngineConfig) -> None:
        self._policy = policy
        self._memory = memory
        self._leaders = leaders
        self._config = config
        self._round = 0
        #: rounds that packed, and rounds that would have but for the bounds
        self.packed_rounds = 0
        self.forced_rounds = 0
        #: times a request was held back for another's prefix
        self.held = 0

    def head(self) -> Sequence | None:
        """The waiting request that goes first; None if none waits."""
        overdue = self._overdue()
        return next(self._policy.order(), None) if overdue is None else overdue

    def choose(
        self, budget: StepBudget, room: int, outlook: Outlook, urgent: Sequence | None = None
    ) -> list[tuple[Sequence, int]]:
        """Up to ``room`` requests in the order in which they are admitted, each with the tokens it may have.
        One that cannot be admitted holds up those after it. An ``urgent`` one goes alone."""
        if urgent is not None:
            return [] if urgent.pending else [(urgent, self._memory.uncached(urgent))]
        config, overdue = self._config, self._overdue()
        look = _Look(self._candidates(overdue), self._memory, outlook, room)
        if config.admission == "fifo":
            return self._in_order(look, budget)
        while len(look.found) < config.lookahead and look.advance():
            pass
        if len(look.found) < 2 or budget.holds(cost for _, cost in look.found):
            return self._in_order(look, budget)  # tokens are not what is short
        self._round += 1
        if overdue or (config.force_fifo_every and self._round % config.force_fifo_every == 0):
            self.forced_rounds += 1
            return self._in_order(look, budget)
        self.packed_rounds += 1
        return self._packed(look.found, budget)

    def _overdue(self) -> Sequence | None:
        eldest = self._policy.eldest()
        return eldest if eldest is not None and eldest.passed >= self._config.max_passed_over else None

    def _candidates(self, first: Sequence | None) -> Iterator[tuple[Sequence, Sequence | None]]:
        """Waiting requests in order; with each one that is better off waiting for a prefix, the request that
        computes it or is about to."""
        marks: dict[object, Sequence] = {}
        held = 0
        order = self._policy.order()
        for sequence in order if first is None else chain((first,), (r for r in order if r is not first)):
            if sequence.pending:
                return  # just retracted, its newest tokens still to be read: memory is short
            mark = self._leaders.mark(sequence)
            leader = None if mark is None else self._leaders.get(mark) or marks.setdefault(mark, sequence)
            if leader is None or leader is sequence:
                yield sequence, None
                continue
            held += 1
            self.held += 1
            if self._memory.states is not None:
                self._memory.states.part(leader, sequence)
            if held > self._config.lookahead:
                return
            yield sequence, leader

    def _in_order(self, look: _Look, budget: StepBudget) -> list[tuple[Sequence, int]]:
        left = budget.most()
        chosen: list[tuple[Sequence, int]] = []
        while left > 0 and (len(chosen) < len(look.found) or look.advance()):
            chosen.append(look.found[len(chosen)])
            left -= budget.share(chosen[-1][1])
        if left > 0 and look.blocked is not None:
            chosen.append(look.blocked)
        return chosen

    def _packed(self, window: list[tuple[Sequence, int]], budget: StepBudget) -> list[tuple[Sequence, int]]:
        left = budget.whole(budget.left())
        given: dict[int, int] = {}
        first = budget.share(window[0][1])
        if first > left and budget.room() > left:
            # The first in order is too long for the budget, and may have its chunk all the same.
            given[0] = window[0][1]
            left = budget.whole(min(left, budget.tokens - min(first, budget.room())))
        for _, group in groupby(range(len(window)), lambda at: self._policy.rank(window[at][0])):
            equals = [at for at in group if at not in given]
            for at in sorted(equals, key=lambda at: (window[at][1], at)):
                cost = budget.share(window[at][1])
                if cost > left:
                    break
                given[at] = window[at][1]
                left -= cost
            # Nothing of the step is wasted: what is left goes to the first in order that did not fit.
            rest = next((at for at in equals if at not in given), None)
            if rest is not None:
                if left > 0:
                    given[rest] = left
                break
        return [(window[at][0], given[at]) for at in sorted(given)]


class _Look:
    """A look into the queue in its order, as far as slots and pages go.

    Requests that are held back for a prefix are not found, but keep their slot and pages: those after them
    find what these leave.
    """

    __slots__ = ("_candidates", "_claimed", "_memory", "_outlook", "_room", "blocked", "found")

    def __init__(
        self,
        candidates: Iterator[tuple[Sequence, Sequence | None]],
        memory: Memory,
        outlook: Outlook,
        room: int,
    ) -> None:
        self._candidates = candidates
        self._memory = memory
        self._outlook = outlook
        self._room = room
        self._claimed = False
        #: requests with the tokens that each would have to compute
        self.found: list[tuple[Sequence, int]] = []
        #: the first one after them, for which there may be no pages
        self.blocked: tuple[Sequence, int] | None = None

    def advance(self) -> bool:
        """Find one more request; False if there is none, no slot for it, or no pages."""
        while self._room > 0:
            sequence, leader = next(self._candidates, (None, None))
            if sequence is None:
                break
            self._room -= 1
            if leader is not None:
                self._outlook.claim(sequence, leader)
                self._claimed = True
                continue
            found = (sequence, self._memory.uncached(sequence))
            if self._outlook.admits(sequence):
                self.found.append(found)
                return True
            self._room = 0
            # Parked requests may still give it their pages.
            self.blocked = None if self._claimed else found
        return False
