"""The scheduler against a naive model of the device and of every request, and the bugs the model must find.

No event loop and no device: rules submit, plan, resolve, fail, abort, park, flush and retract in any
order, with up to three steps in flight. The model keeps what every KV cell holds, token by token, which
launched step could touch which page and slot, and what was delivered to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aioinfer.cache.fenced import FencedPool
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.radix import RadixTree
from aioinfer.cache.slots import SlotPool
from aioinfer.params import SamplingParams
from aioinfer.request import Request, RequestState
from aioinfer.scheduling.admission import Limits, PrefixLeaders
from aioinfer.scheduling.audit import audit, check, check_idle
from aioinfer.scheduling.decodes import DecodeBatch
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import POLICIES
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.step import BAD_LOGITS, NO_TOKEN, Row, Step
from tests.engine.simulation import LawChecker

STOP = 2
#: what a cell holds that nobody may read
JUNK = ("junk",)


class Injected(RuntimeError):
    """What an injected fault raises."""


@dataclass
class Life:
    """What the model knows of one request."""

    request: Request
    #: everything the device sampled, and what of it was delivered
    sampled: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    reason: str | None = None
    #: a step of it failed: what later ones in flight compute for it is junk
    doomed: bool = False
    #: its tenancy of a slot: who touches a page is (key, tenancy)
    tenancy: int = 0

    def cell(self, stop: int) -> tuple[Any, ...]:
        """What the cell of position ``stop - 1`` holds: all tokens up to there, and for whom."""
        return (self.request.namespace, *self.request.prompt_ids, *self.sampled)[: stop + 1]


@dataclass
class Flight:
    step: Step
    tokens: list[int]
    rows: list[Row]
    #: who touches a page, and who wrote a cell
    touched: dict[int, set[tuple[int, int]]]
    written: dict[int, int]


class NaiveDevice:
    """Computes rows by the book, and looks at every cell before it reads it."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        self.page_size = page_size
        self.cells: list[tuple[Any, ...]] = [JUNK] * ((num_pages + 1) * page_size)
        self.writer = [0] * len(self.cells)
        self.tables: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.tenants = [0] * (num_slots + 1)
        self.relay = [BAD_LOGITS] * (num_slots + 1)

    def launch(
        self, step: Step, lives: dict[int, Life], flights: list[Flight], luck: Sequence[int]
    ) -> Flight:
        rows = step.rows
        flight = Flight(step, [], rows, {}, {})
        for row in rows:
            self._tell(row, lives[row.request.key], flights)
        for row in rows:
            self._write(row, lives[row.request.key], flight, flights)
        for at, row in enumerate(rows):
            token = NO_TOKEN
            if row.samples:
                life = lives[row.request.key]
                assert row.output_index == len(life.sampled), "a token is sampled twice, or was lost"
                token = luck[at % len(luck)]
                life.sampled.append(token)
                self.relay[row.slot] = token
            flight.tokens.append(token)
        return flight

    def _tell(self, row: Row, life: Life, flights: list[Flight]) -> None:
        table = self.tables[row.slot]
        if row.admission is not None:
            busy = [each.step.id for each in flights if any(r.slot == row.slot for r in each.rows)]
            assert not busy, f"slot {row.slot} is handed out while steps {busy} use it"
            assert [*row.admission.output_ids] == life.sampled, "introduced with other tokens than it has"
            table.clear()
            self.tenants[row.slot] = row.request.key
            self.relay[row.slot] = BAD_LOGITS
            life.tenancy += 1
        assert self.tenants[row.slot] == row.request.key, "the slot has another tenant"
        assert row.first_new_page <= len(table) or not row.new_pages, "a gap in the page table"
        table[row.first_new_page : row.first_new_page + len(row.new_pages)] = row.new_pages

    def _write(self, row: Row, life: Life, flight: Flight, flights: list[Flight]) -> None:
        table, size = self.tables[row.slot], self.page_size
        assert row.length >= 1
        assert row.kv_length <= len(table) * size, "a position without a page"
        cells = [table[at // size] * size + at % size for at in range(row.kv_length)]
        who = (row.request.key, life.tenancy)
        for page in {cell // size for cell in cells[row.start :]}:
            others = {each for past in flights for each in past.touched.get(page, ())} - {who}
            assert not others, f"page {page} is written while {others} use it"
        for cell in cells:
            flight.touched.setdefault(cell // size, set()).add(who)
        if not life.doomed:
            for at, cell in enumerate(cells[: row.start]):
                assert self.cells[cell] == life.cell(at + 1), f"{row.request} reads what is not its own"
        ids = [self.relay[row.slot]] if row.ids is None else list(row.ids)
        own = [*row.request.prompt_ids, *life.sampled][row.start : row.kv_length]
        assert ids == own, "the row computes other tokens than the request has"
        for at in range(row.start, row.kv_length):
            self.cells[cells[at]] = JUNK if life.doomed else life.cell(at + 1)
            self.writer[cells[at]] = flight.step.id
            flight.written[cells[at]] = row.request.key


def submissions() -> st.SearchStrategy[dict[str, Any]]:
    """Few prompts that begin alike, told apart late or never."""
    prompts = st.builds(
        lambda base, length, tail: [*(base * 12)[:length], *tail],
        st.sampled_from([(0,), (0,), (0, 1)]),
        st.integers(1, 11),
        st.lists(st.integers(0, 1), max_size=2),
    )
    return st.fixed_dictionaries(
        {
            "prompt": prompts,
            "max_tokens": st.sampled_from([1, 2, 3, 6, 12]),
            "priority": st.integers(0, 2),
            "namespace": st.sampled_from(["", "", "", "tenant"]),
            "routing_key": st.sampled_from([None, "a", "b"]),
        }
    )


def configs() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "policy": st.sampled_from(list(POLICIES)),
            "page_size": st.sampled_from([1, 2, 4]),
            "pages": st.integers(0, 8),
            "prefix_cache": st.sampled_from([True, True, True, False]),
            "window": st.sampled_from([2, 1, 0]),
            "max_running_requests": st.integers(1, 5),
            "more_tokens": st.sampled_from([0, 1, 4, 30]),
            "chunk_size": st.sampled_from([1, 2, 3, 5, 64]),
            "max_prefill_tokens": st.sampled_from([None, None, 2, 5]),
            "max_decode_rows": st.sampled_from([None, None, 1, 2]),
            "mixed": st.booleans(),
            "first": st.sampled_from(["decode", "prefill"]),
            "admission": st.sampled_from(["fifo", "pack"]),
            "lookahead": st.sampled_from([1, 3, 64]),
            "force_fifo_every": st.sampled_from([0, 2, 8]),
            "max_passed_over": st.sampled_from([1, 4]),
            "share_prefix_tokens": st.sampled_from([0, 2, 4]),
            "preemption": st.booleans(),
            "new_token_ratio": st.sampled_from([0.0, 0.0, 0.4, 1.0]),
        }
    )


TOKENS = st.lists(
    st.sampled_from([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, STOP, BAD_LOGITS]), min_size=1, max_size=4
)
PICK = st.integers(0, 15)


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that may happen to a scheduler, in any order."""

    #: settings that are not left to chance
    fixed: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[int, Life] = {}
        self.flights: list[Flight] = []
        self.ended: set[int] = set()
        self.retracted: list[int] = []

    @initialize(config=configs())
    def build(self, config: dict[str, Any]) -> None:
        config = {**config, **self.fixed}
        size, running = config.pop("page_size"), config["max_running_requests"]
        self.num_pages = -(-14 // size) + config.pop("pages")
        self.window = config.pop("window")
        cache, policy = config.pop("prefix_cache"), config.pop("policy")
        config["max_step_tokens"] = running + config.pop("more_tokens")
        least = min(0.1, config["new_token_ratio"])
        num_slots = running * (self.window + 1)
        memory = Memory(PageAllocator(self.num_pages, size), SlotPool(num_slots), prefix_cache=cache)
        limits = Limits(**config, min_new_token_ratio=least)
        self.memory, self.capacity = memory, self.num_pages * size
        self.scheduler = LawChecker(watched(self)(memory, limits, POLICIES[policy](memory)))
        self.device = NaiveDevice(self.num_pages, size, num_slots)

    def _pick(self, among: list[Request], pick: int) -> Request:
        assume(among)
        return among[pick % len(among)]

    # -- rules ----------------------------------------------------------------------------------

    @rule(wishes=st.lists(submissions(), min_size=1, max_size=4))
    def submit(self, wishes: list[dict[str, Any]]) -> None:
        for wish in wishes:
            self._submit(dict(wish))

    def _submit(self, wish: dict[str, Any]) -> None:
        prompt, key = wish.pop("prompt"), len(self.lives) + 1
        max_tokens = wish.pop("max_tokens")
        request = Request(
            key,
            prompt,
            SamplingParams(max_tokens=max_tokens),
            seed=key,
            stop_ids=frozenset({STOP}),
            max_length=min(self.capacity, len(prompt) + max_tokens),
            **wish,
        )
        self.lives[key] = Life(request)
        self.scheduler.submit(request)

    @precondition(lambda self: len(self.flights) <= self.window)
    @rule(luck=TOKENS)
    def plan(self, luck: Sequence[int]) -> None:
        self._plan(luck)

    def _plan(self, luck: Sequence[int]) -> bool:
        step = self.scheduler.plan()
        if step is None:
            return False
        assert len({row.request.key for row in step.rows}) == step.num_rows, "a request has two rows"
        self.flights.append(self.device.launch(step, self.lives, self.flights, luck))
        return True

    @precondition(lambda self: self.flights)
    @rule()
    def resolve(self) -> None:
        flight = self.flights.pop(0)
        expected = []
        for row, token in zip(flight.rows, flight.tokens, strict=True):
            life = self.lives[row.request.key]
            if not row.samples or life.reason is not None:
                continue
            expected.append(row.request)
            if token == BAD_LOGITS:
                life.reason = "abort"
                continue
            life.delivered.append(token)
            if token == STOP:
                life.reason = "stop"
            elif len(row.request.prompt_ids) + len(life.delivered) == row.request.max_length:
                life.reason = "length"
        assert self.scheduler.resolve(flight.step, flight.tokens) == expected

    @rule(steps=st.integers(1, 6), luck=TOKENS)
    def run(self, steps: int, luck: Sequence[int]) -> None:
        """As the engine goes on: always as many steps in flight as may be."""
        for at in range(steps):
            if len(self.flights) > self.window or not self._plan([*luck[at % len(luck) :], *luck]):
                if not self.flights:
                    return
                self.resolve()

    @precondition(lambda self: self.flights)
    @rule()
    def fail(self) -> None:
        flight = self.flights.pop(0)
        expected = set()
        for row in flight.rows:
            life = self.lives[row.request.key]
            life.doomed = True
            if life.reason is None:
                life.reason = "abort"
                expected.add(row.request.key)
        for each in (flight, *self.flights):
            for cell, key in each.written.items():
                if self.lives[key].doomed and self.device.writer[cell] == each.step.id:
                    self.device.cells[cell] = JUNK
        failed = self.scheduler.fail(flight.step, Injected())
        assert {request.key for request in failed} == expected

    @precondition(lambda self: self.lives)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        request = self._pick([life.request for life in self.lives.values()], pick)
        life = self.lives[request.key]
        assert self.scheduler.finish(request, "abort") == (life.reason is None), "a request ends once"
        life.reason = life.reason or "abort"

    @precondition(lambda self: self.lives)
    @rule(pick=PICK)
    def park(self, pick: int) -> None:
        self.scheduler.park(self._pick([life.request for life in self.lives.values()], pick))

    @rule(pick=PICK)
    def unpark(self, pick: int) -> None:
        parked = [life.request for life in self.lives.values() if life.request.parked]
        self.scheduler.unpark(self._pick(parked, pick))

    @rule()
    def flush(self) -> None:
        self.memory.flush()

    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        """As if pages were short, at any moment."""
        self.scheduler.scheduler._retract(self._pick(self._retractable(), pick))

    @precondition(lambda self: self.window)
    @rule(pick=PICK, luck=TOKENS)
    def relapse(self, pick: int, luck: Sequence[int]) -> None:
        """Retracted in the middle of its prompt, and let in again while a chunk is still in flight."""
        while len(self.flights) >= self.window:
            self.resolve()
        self._plan(luck)
        halfway = [each for each in self._retractable() if each.key in self.scheduler.prefilling]
        self.scheduler.scheduler._retract(self._pick(halfway, pick))
        self._plan(luck)
        self.resolve()

    def _retractable(self) -> list[Request]:
        active = [key for key, each in self.scheduler.running.items() if not each.parked]
        spared = min(active, default=None)
        return [each for key, each in self.scheduler.running.items() if key != spared]

    # -- laws -----------------------------------------------------------------------------------

    @invariant()
    def counted(self) -> None:
        check(self.scheduler)
        audit(self.scheduler)

    @invariant()
    def free_is_free(self) -> None:
        """No page and no slot is free while a step in flight touches it."""
        pages = {page for flight in self.flights for page in flight.touched}
        assert not pages & set(self.memory.pages._free), "a page is free and in flight"
        slots = {row.slot for flight in self.flights for row in flight.rows}
        assert not slots & set(self.memory.slots._free), "a slot is free and in flight"

    @invariant()
    def cache_is_true(self) -> None:
        """What the tree says is what the pages hold, written by steps that have resolved."""
        if self.memory.tree is None:
            return
        size, device = self.device.page_size, self.device
        stack = [(root, [root.namespace]) for root in self.memory.tree._roots.values()]
        while stack:
            node, tokens = stack.pop()
            keys = memoryview(node.key).cast("i").tolist()
            for at, token in enumerate(keys):
                tokens = [*tokens, token]
                cell = node.pages[at // size] * size + at % size
                assert device.cells[cell] == tuple(tokens), "a cached page holds something else"
                assert device.writer[cell] <= self.scheduler.resolved, "a cached page is still in flight"
            stack += [(child, tokens) for child in node.children.values()]

    @invariant()
    def told(self) -> None:
        """What was delivered stays delivered, and everybody knows how far it is."""
        for life in self.lives.values():
            request = life.request
            assert request.output_ids == life.delivered
            assert request.finish_reason == life.reason
            assert request.finished == (life.reason is not None) == (request.key in self.ended)
            if request.finished:
                assert request.batch is None
                assert not request.pages
                continue
            assert request.pending == len(life.sampled) - len(life.delivered)
            assert request.length == len(request.prompt_ids) + len(life.sampled) <= request.max_length
            assert request.known == len(request.prompt_ids) + len(life.delivered)
            places = (request.key in self.scheduler.running) + (request in self.scheduler.waiting)
            assert places + (request.key in self.scheduler.shelved) == 1
            assert (request.state is RequestState.RUNNING) == (request.key in self.scheduler.running)
        assert {each.key for each in self.scheduler.unfinished()} == self.lives.keys() - self.ended

    @invariant()
    def led(self) -> None:
        """Whoever is waited for is computing."""
        for request in self.scheduler.leaders._leaders.values():
            assert request.key in self.scheduler.running
            assert not request.parked
            assert not request.prefilled

    def teardown(self) -> None:
        """Left alone, everything ends, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        unfinished = [life.request for life in self.lives.values() if life.reason is None]
        for request in unfinished:
            self.scheduler.unpark(request)
        # One position a step for everybody, many times over: each may lose its pages again and again.
        bound = 20 + 40 * sum(request.max_length for request in unfinished)
        while self.scheduler.has_unfinished or self.flights:
            assert bound, "the requests keep each other from ending"
            bound -= 1
            if len(self.flights) > self.window or not self._plan([0, 1, 1]):
                assert self.flights, "nothing is in flight, nothing is planned, and somebody waits"
                self.resolve()
            self.counted()
            self.free_is_free()
            self.cache_is_true()
            self.told()
            self.led()
        check_idle(self.scheduler)
        self.memory.flush()
        assert self.memory.pages.free == self.num_pages
        assert self.memory.slots.free == self.memory.slots.total


def watched(machine: SchedulerMachine) -> type[Scheduler]:
    """A scheduler that tells the machine of ends and retractions from inside."""

    class Watched(Scheduler):
        def _retract(self, request: Request) -> None:
            active = [each.key for each in self.running.values() if not each.parked]
            assert request.parked or request.key != min(active), "the eldest request was retracted"
            machine.retracted.append(request.key)
            super()._retract(request)

        def finish(self, request: Request, reason: Any, error: BaseException | None = None) -> bool:
            first = super().finish(request, reason, error)
            assert not (first and request.key in machine.ended), "a request ended twice"
            machine.ended.add(request.key)
            return first

    return Watched


LAWFUL = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def test_the_scheduler_keeps_the_laws() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=LAWFUL)  # type: ignore[no-untyped-call]


# -- planted bugs --------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def pages_without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageAllocator, "give", lambda self, items, fence: FencedPool.give(self, items, 0))


@mutant
def slots_without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "give", lambda self, items, fence: FencedPool.give(self, items, 0), raising=False)


@mutant
def fence_of_the_next_result(patch: pytest.MonkeyPatch) -> None:
    def give(self: PageAllocator, items: Any, fence: int) -> None:
        FencedPool.give(self, items, min(fence, self.last_resolved + 1))

    patch.setattr(PageAllocator, "give", give)


@mutant
def cached_pages_without_fence(patch: pytest.MonkeyPatch) -> None:
    unlock = RadixTree.unlock
    patch.setattr(RadixTree, "unlock", lambda self, lock, fence: unlock(self, lock, 0))


@mutant
def release_by_token_count(patch: pytest.MonkeyPatch) -> None:
    release = Memory.release

    def by_tokens(self: Memory, request: Request) -> None:
        del request.pages[max(request.cached_pages, self.pages.pages_for(request.known)) :]
        release(self, request)

    patch.setattr(Memory, "release", by_tokens)


@mutant
def committed_before_it_resolved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "committed", property(lambda self: min(self.computed, self.known)))


@mutant
def unlocked_twice(patch: pytest.MonkeyPatch) -> None:
    unlock = RadixTree.unlock

    def twice(self: RadixTree, lock: Any, fence: int) -> Any:
        node = lock.node
        unlock(self, lock, fence)
        lock._node = node
        return unlock(self, lock, fence)

    patch.setattr(RadixTree, "unlock", twice)


@mutant
def late_token_delivered(patch: pytest.MonkeyPatch) -> None:
    resolve = Scheduler.resolve

    def late(self: Scheduler, step: Step, tokens: Sequence[int], forced: Any = ()) -> list[Request]:
        for row, token in zip(step.rows, tokens, strict=True):
            if row.samples and row.request.finished:
                row.request.output_ids.append(token)
        return resolve(self, step, tokens, dict(forced))

    patch.setattr(Scheduler, "resolve", late)


@mutant
def retraction_forgets_pending_tokens(patch: pytest.MonkeyPatch) -> None:
    restart = Request.restart

    def forgetful(self: Request, cached: int = 0) -> None:
        restart(self, cached)
        self._sampled = len(self.output_ids)

    patch.setattr(Request, "restart", forgetful)


@mutant
def chunk_of_a_former_life_commits(patch: pytest.MonkeyPatch) -> None:
    resolve_prefill = Scheduler._resolve_prefill

    def former(self: Scheduler, step: Step, row: Row, token: int, forced: Sequence[int]) -> Sequence[Request]:
        if not row.request.finished and not row.samples:
            row.request.commit_prefill(row.kv_length, last=False)
            if row.request.lock is not None:
                self._share(row.request)
            return ()
        return resolve_prefill(self, step, row, token, forced)

    patch.setattr(Scheduler, "_resolve_prefill", former)


@mutant
def column_stays_when_its_row_moves(patch: pytest.MonkeyPatch) -> None:
    remove = DecodeBatch.remove

    def half(self: DecodeBatch, request: Request) -> None:
        index = request.batch_index
        before = self._columns[:, index].copy()
        remove(self, request)
        self._columns[:, index] = before

    patch.setattr(DecodeBatch, "remove", half)


@mutant
def new_pages_not_told(patch: pytest.MonkeyPatch) -> None:
    def only_capacity(self: DecodeBatch, request: Request) -> None:
        self.capacity[request.batch_index] = len(request.pages) * self._page_size

    patch.setattr(DecodeBatch, "changed_pages", only_capacity)


@mutant
def exchanged_pages_not_told(patch: pytest.MonkeyPatch) -> None:
    commit = Memory.commit

    def silent(self: Memory, request: Request, fence: int) -> bool:
        sent = request.sent_pages
        commit(self, request, fence)
        request.sent_pages = sent
        return False

    patch.setattr(Memory, "commit", silent)


@mutant
def namespaces_mixed_up(patch: pytest.MonkeyPatch) -> None:
    lock, find = RadixTree.lock, RadixTree.find
    patch.setattr(RadixTree, "lock", lambda self, key, namespace="": lock(self, key))
    patch.setattr(RadixTree, "find", lambda self, key, namespace="": find(self, key))


@mutant
def parked_ones_go_on(patch: pytest.MonkeyPatch) -> None:
    def park(self: Scheduler, request: Request) -> None:
        request.parked = not request.finished and request.state is RequestState.RUNNING

    patch.setattr(Scheduler, "park", park)


@mutant
def leaders_stay_when_they_leave(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixLeaders, "leave", lambda self, request: None)


@mutant
def nobody_is_retracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_victim", lambda self: None)


@mutant
def the_eldest_is_retracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_victim", lambda self: next(iter(self.running.values()), None))


class Crowded(SchedulerMachine):
    """Short chunks, small pages, many in flight: where lives follow each other most quickly."""

    fixed: ClassVar[dict[str, Any]] = {
        "page_size": 1,
        "pages": 30,
        "prefix_cache": True,
        "window": 2,
        "max_running_requests": 5,
        "chunk_size": 2,
        "more_tokens": 30,
        "share_prefix_tokens": 0,
        "mixed": True,
    }


HUNT = settings(LAWFUL, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    machine = Crowded if name == "chunk_of_a_former_life_commits" else SchedulerMachine
    with pytest.raises((AssertionError, IndexError, RuntimeError, KeyError)):
        run_state_machine_as_test(machine, settings=HUNT)  # type: ignore[no-untyped-call]
