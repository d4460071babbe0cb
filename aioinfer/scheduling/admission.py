"""Admission: which waiting requests get a slot, with how many tokens, and which pages are kept back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import Policy
from aioinfer.scheduling.request import Request

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig

__all__ = ["Admitter", "NewTokenRatio", "PrefixLeaders", "StepBudget"]


class StepBudget:
    """Counts down the tokens of one step.

    The first prefill chunk of a step may exceed the prefill budget: ``chunk_size`` is what bounds it. With
    fifo it then goes alone; with packing it comes on top, and others that fit still ride along.
    """

    __slots__ = ("_chunk_size", "_on_top", "_page_size", "_unit", "_untouched", "prefill", "tokens")

    def __init__(self, config: EngineConfig, page_size: int, tokens: int, unit: int = 1) -> None:
        """``unit``: what tokens come in, positions of a block for diffusion models."""
        self.tokens = tokens
        self._unit = unit
        #: of these, tokens for prefill
        self.prefill = tokens
        if config.max_prefill_tokens is not None:
            self.prefill = min(self.prefill, config.max_prefill_tokens)
        # A chunk size below the unit is taken for one.
        self._chunk_size = max(config.chunk_size, unit)
        self._page_size = page_size
        self._on_top = config.admission == "pack"
        self._untouched = True

    def room(self) -> int:
        """Tokens that the next prefill chunk may have."""
        prefill = max(self.prefill, self._chunk_size) if self._untouched else self.prefill
        return self.whole(min(self.tokens, prefill, self._chunk_size))

    def whole(self, tokens: int) -> int:
        """Of so many tokens, those that make whole units."""
        return tokens - tokens % self._unit

    def chunk(self, start: int, remaining: int, most: int | None = None) -> int:
        """Length of a prefill chunk from position ``start`` on. It ends at a page boundary, so that its
        pages can be shared, unless it is the last one or smaller than a page."""
        length = min(remaining, self.room() if most is None else min(most, self.room()))
        length = self.whole(length)
        aligned = (start + length) // self._page_size * self._page_size - start
        return aligned if aligned > 0 and length < remaining else length

    def spend_prefill(self, tokens: int) -> None:
        self.tokens -= tokens
        if not (self._untouched and self._on_top and tokens > self.prefill):
            self.prefill -= tokens
        self._untouched = False

    def spend_decodes(self, tokens: int) -> None:
        self.tokens -= tokens
        self.prefill = min(self.prefill, self.tokens)


class NewTokenRatio:
    """Which share of the tokens they may still generate running requests are expected to use.

    Pages for that share are kept free at admission. A retraction shows that it was too small: it then
    rises half-way to one, and decays from there step by step. (The idea is SGLang's.)
    """

    __slots__ = ("_decay", "_least", "value")

    def __init__(self, config: EngineConfig) -> None:
        self.value = max(config.new_token_ratio, config.min_new_token_ratio)
        self._least = config.min_new_token_ratio
        self._decay = config.new_token_ratio_decay

    def decay(self) -> None:
        self.value = max(self._least, self.value - self._decay)

    def rise(self) -> None:
        self.value += (1 - self.value) / 2


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
        self._leaders: dict[object, Request] = {}
        self._marks: dict[int, object] = {}

    def mark(self, request: Request) -> object | None:
        """What two requests have in common if one should wait for the other; None if not worth it."""
        if not self._pages or not request.kv.cacheable:
            return None
        if request.kv.lock is None:
            hit, node = self._memory.lookup(request)
        else:
            hit, node = request.kv.cached_pages, request.kv.lock.node
        size = self._memory.pages.page_size
        stop = (hit + self._pages) * size
        if stop > request.cursor.reusable or (node is not None and node.detached):
            return None
        # The root of a namespace comes and goes while nothing is cached there.
        return (node if hit else request.namespace, hit, request.token_key(hit * size, stop))

    def lead(self, request: Request) -> None:
        """The request is computing from where its cached prefix ends; call again when that moves."""
        self.leave(request)
        mark = self.mark(request)
        if mark is not None and self._leaders.setdefault(mark, request) is request:
            self._marks[request.key] = mark

    def leave(self, request: Request) -> None:
        """It computes no prefix any more."""
        mark = self._marks.pop(request.key, None)
        if mark is not None:
            del self._leaders[mark]

    def __contains__(self, mark: object) -> bool:
        return mark in self._leaders


class Admitter:
    """Chooses from the queue; knows nothing of slots and pages.

    ``fifo`` takes requests in the policy's order until the step is full. ``pack`` looks ahead: those that
    fit whole go in beside each other, cheapest first, and the first in order gets what is left. Every
    ``force_fifo_every`` rounds, and when the eldest was passed over ``max_passed_over`` times, it is
    fifo's turn, so no request starves.
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

    def choose(
        self, budget: StepBudget, room: int, urgent: Request | None = None
    ) -> tuple[list[tuple[Request, int]], bool]:
        """Up to ``room`` requests in the order of the policy, each with the tokens it may have; and
        whether a request that cannot be admitted holds up those behind it. An ``urgent`` one goes alone."""
        config = self._config
        self._round += 1
        if urgent is not None:
            return ([] if urgent.pending else [(urgent, self._memory.uncached(urgent))]), True
        eldest, overdue = self._policy.eldest(), None
        if eldest is not None and eldest.passed >= config.max_passed_over:
            overdue = eldest
        candidates = self._candidates(overdue)
        if config.admission == "fifo":
            return self._in_order(candidates, budget, room), True
        if overdue or (config.force_fifo_every and self._round % config.force_fifo_every == 0):
            self.forced_rounds += 1
            return self._in_order(candidates, budget, room), True
        self.packed_rounds += 1
        return self._packed(list(islice(candidates, config.lookahead)), budget, room), False

    def _candidates(self, first: Request | None) -> Iterator[Request]:
        """Waiting requests in order, without those that are better off waiting for a prefix."""
        marks: set[object] = set()
        held = 0
        order = self._policy.order()
        for request in order if first is None else chain((first,), (r for r in order if r is not first)):
            if request.pending:
                return  # just retracted, its newest tokens still to be read: memory is short
            mark = self._leaders.mark(request)
            if mark is None or not (mark in self._leaders or mark in marks):
                marks.add(mark)
                yield request
                continue
            held += 1
            self.held += 1
            if held > self._config.lookahead:
                return

    def _in_order(
        self, candidates: Iterator[Request], budget: StepBudget, room: int
    ) -> list[tuple[Request, int]]:
        left = max(budget.room(), min(budget.tokens, budget.prefill))
        chosen: list[tuple[Request, int]] = []
        while left > 0 and len(chosen) < room and (request := next(candidates, None)) is not None:
            cost = self._memory.uncached(request)
            chosen.append((request, cost))
            left -= min(cost, self._config.chunk_size)
        return chosen

    def _packed(self, window: list[Request], budget: StepBudget, room: int) -> list[tuple[Request, int]]:
        costs = [self._memory.uncached(request) for request in window]
        left = budget.whole(min(budget.tokens, budget.prefill))
        fits: set[int] = set()
        if window and costs[0] > left and budget.room() > left:
            # The first in order is too long for the budget, and may have its chunk all the same.
            fits.add(0)
            left = budget.whole(min(left, budget.tokens - min(costs[0], budget.room())))
        for at in sorted(range(len(window)), key=lambda at: (costs[at], at)):
            if at in fits:
                continue
            if costs[at] > left or len(fits) == room:
                break
            fits.add(at)
            left -= costs[at]
        # Nothing of the step is wasted: what is left goes to the first in order that did not fit.
        first = next((at for at in range(len(window)) if at not in fits), None)
        if first is not None and len(fits) < room and (left > 0 or not fits):
            costs[first] = left if fits else costs[first]
            fits.add(first)
        return [(window[at], costs[at]) for at in sorted(fits)]
