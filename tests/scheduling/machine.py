"""SchedulerMachine: the scheduler against a naive model of the device and of every request.

No event loop and no device: rules submit, plan, resolve, fail, abort, park, flush and retract in any
order, with up to three steps in flight. The model keeps what every KV cell holds, token by token, which
launched step could touch which page and slot, and what was delivered to whom.
"""

from __future__ import annotations

from collections import abc
from typing import Any, ClassVar

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioinfer.cache.nodes import Hold, Node
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.radix import token_key
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig, policy_names
from aioinfer.params import SamplingParams
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.scheduling.audit import audit, check, check_idle
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import ParkedFor, Sequence, SequenceState
from aioinfer.scheduling.step import Outcome
from tests.engine.laws import LawChecker
from tests.scheduling.naive import Flight, Life, NaiveDevice
from tests.sequences import new_sequence

STOP = 2


class Injected(RuntimeError):
    """What an injected fault raises."""


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
            "policy": st.sampled_from(policy_names()),
            "page_size": st.sampled_from([1, 2, 4]),
            "pages": st.integers(0, 8),
            "prefix_cache": st.sampled_from([True, True, True, False]),
            "snapshots": st.sampled_from([None, 16, 2, 1, 0]),
            "window": st.sampled_from([2, 1, 0]),
            "max_running_requests": st.integers(1, 5),
            "more_tokens": st.sampled_from([0, 1, 4, 30]),
            "chunk_size": st.sampled_from([1, 2, 3, 5, 64]),
            "max_prefill_tokens": st.sampled_from([None, None, 2, 5]),
            "itl_target": st.sampled_from([0.0, 0.0, 0.01]),
            "max_decode_rows": st.sampled_from([None, None, 1, 2]),
            "mixed": st.booleans(),
            "step_priority": st.sampled_from(["decode", "prefill"]),
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
WAITS = st.sampled_from(ParkedFor)


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that may happen to a scheduler, in any order."""

    #: settings that are not left to chance
    fixed: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[int, Life] = {}
        self.flights: list[Flight] = []
        self.ended: set[int] = set()
        #: those that :meth:`told` has seen finished
        self.settled: set[int] = set()
        self.retracted: list[int] = []
        #: tokens that the next step may have at most, after one ran out of memory
        self.most: int | None = None
        self.starting_over = False
        #: holds, and the pages that were left of each when it was last looked at
        self.holds: dict[Hold, int] = {}

    @initialize(config=configs())
    def build(self, config: dict[str, Any]) -> None:
        config = {**config, **self.fixed}
        size, running = config.pop("page_size"), config["max_running_requests"]
        self.num_pages = -(-14 // size) + config.pop("pages")
        self.window = config.pop("window")
        cache, snapshots = config.pop("prefix_cache"), config.pop("snapshots")
        config["max_step_tokens"] = running + config.pop("more_tokens")
        least = min(0.1, config["new_token_ratio"])
        num_slots = running * (self.window + 1)
        memory = Memory(
            PageAllocator(self.num_pages, size), SlotPool(num_slots), prefix_cache=cache, snapshots=snapshots
        )
        settings = EngineConfig(**config, min_new_token_ratio=least)
        self.memory, self.capacity = memory, self.num_pages * size
        self.scheduler = LawChecker(watched(self, Scheduler(memory, settings)))
        self.device = NaiveDevice(self.num_pages, size, num_slots, snapshots)

    def _pick(self, among: list[Sequence], pick: int) -> Sequence:
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
        request = new_sequence(
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
    def plan(self, luck: abc.Sequence[int]) -> None:
        self._plan(luck)

    def _plan(self, luck: abc.Sequence[int]) -> bool:
        step = self.scheduler.plan()
        if step is None:
            return False
        assert len({row.sequence.key for row in step.rows}) == step.num_rows, "a request has two rows"
        suspects = [row for row in step.rows if self.lives[row.sequence.key].suspect]
        assert not suspects or step.num_rows == 1, "a step could raise for others once more"
        assert self.most is None or step.num_tokens <= self.most, "as much as what was too much"
        self.flights.append(self.device.launch(step, self.lives, self.flights, luck))
        return True

    @precondition(lambda self: self.flights)
    @rule()
    def resolve(self) -> None:
        flight = self.flights.pop(0)
        self.most = None
        expected = []
        for row, token in zip(flight.rows, flight.tokens, strict=True):
            life = self.lives[row.sequence.key]
            if not row.samples or life.reason is not None or row.sequence.key in flight.void:
                continue
            expected.append(row.sequence)
            if token == BAD_LOGITS:
                life.reason = "abort"
                continue
            life.delivered.append(token)
            if token == STOP:
                life.reason = "stop"
            elif len(row.sequence.prompt_ids) + len(life.delivered) == row.sequence.max_length:
                life.reason = "length"
        assert self.scheduler.resolve(flight.step, Outcome(flight.tokens)) == expected

    @rule(steps=st.integers(1, 6), luck=TOKENS)
    def run(self, steps: int, luck: abc.Sequence[int]) -> None:
        """As the engine goes on: always as many steps in flight as may be."""
        for at in range(steps):
            if len(self.flights) > self.window or not self._plan([*luck[at % len(luck) :], *luck]):
                if not self.flights:
                    return
                self.resolve()

    @precondition(lambda self: self.flights)
    @rule()
    def fail(self) -> None:
        """The oldest step raises: for which of its requests, nobody knows."""
        flight = self.flights.pop(0)
        expected = set()
        for key, life in self._struck(flight).items():
            if len(flight.rows) == 1 or life.failed_at == len(life.delivered):
                life.reason = "abort"
                expected.add(key)
            life.failed_at = len(life.delivered)
        self.starting_over = True
        failed = self.scheduler.fail(flight.step, Injected())
        self.starting_over = False
        assert {request.key for request in failed} == expected

    def _struck(self, flight: Flight) -> dict[int, Life]:
        """The requests that go on from a step that failed, and cannot: each has what it had when it began."""
        self.device.spoil(flight, self.lives)
        struck: dict[int, Life] = {}
        for row in flight.rows:
            key, life = row.sequence.key, self.lives[row.sequence.key]
            if life.reason is not None or key in flight.void:
                continue
            if key in self.scheduler.queues.running:
                if flight.tenancies[key] != life.tenancy:
                    continue  # a chunk of an earlier life
            elif life.sampled == life.delivered:
                continue
            for each in self.flights:
                each.void.add(key)
                self.device.spoil(each, {key})
            life.sampled = list(life.delivered)
            struck[key] = life
        return struck

    @precondition(lambda self: self.flights)
    @rule()
    def run_out(self) -> None:
        """The memory does not suffice for the oldest step; those behind it are computed from nothing."""
        flight = self.flights.pop(0)
        again: list[tuple[int, int]] = []
        for key, life in self._struck(flight).items():
            if life.ran_out_at == len(life.delivered):
                again.append((life.request.known, key))
            life.ran_out_at = len(life.delivered)
        expected = {key for _, key in [max(again, default=(0, 0))] if key}
        for key in expected:
            self.lives[key].reason = "abort"
        self.most = max(1, min(flight.step.num_tokens // 2, self.most or flight.step.num_tokens))
        self.starting_over = True
        failed = self.scheduler.run_out(flight.step, Injected())
        self.starting_over = False
        assert {request.key for request in failed} == expected

    @precondition(lambda self: self.lives)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        request = self._pick([life.request for life in self.lives.values()], pick)
        life = self.lives[request.key]
        assert self.scheduler.finish(request, "abort") == (life.reason is None), "a request ends once"
        life.reason = life.reason or "abort"

    @precondition(lambda self: self.lives)
    @rule(pick=PICK, waits=WAITS)
    def park(self, pick: int, waits: ParkedFor) -> None:
        self.scheduler.queues.park(self._pick([life.request for life in self.lives.values()], pick), waits)

    @precondition(lambda self: any(life.request.parked for life in self.lives.values()))
    @rule(pick=PICK, waits=WAITS)
    def unpark(self, pick: int, waits: ParkedFor) -> None:
        request = self._pick([life.request for life in self.lives.values() if life.request.parked], pick)
        left = request.parked_for if request.finished else request.parked_for - {waits}
        self.scheduler.queues.unpark(request, waits)
        assert request.parked == bool(left), "it goes on when all that it waits for has come"

    @rule()
    def flush(self) -> None:
        self.memory.flush()
        assert not self.memory.held_pages

    @precondition(lambda self: self.lives)
    @rule(pick=PICK, most=st.integers(1, 24), again=st.booleans())
    def hold(self, pick: int, most: int, again: bool) -> None:
        """Somebody will come back to what a request has so far, or to its beginning."""
        life = self._pick([life.request for life in self.lives.values()], pick)
        before, key = self.memory.available, token_key([*life.prompt_ids, *life.output_ids][:most])
        hold = self.memory.hold(key, life.namespace)
        assert (hold is None) == (self.memory.tree is None)
        for each in (hold, self.memory.hold_again(hold) if again else None):
            if each is not None:
                self.holds[each] = each.num_pages
        assert self.memory.available == before, "a hold takes a page from others"

    @precondition(lambda self: self.holds)
    @rule(pick=PICK)
    def release_hold(self, pick: int) -> None:
        hold = [*self.holds][pick % len(self.holds)]
        before = self.memory.available
        self.memory.release_hold(hold)
        del self.holds[hold]
        assert self.memory.available == before

    @precondition(lambda self: self.lives)
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        """Somebody wants the pages of a request now."""
        request = self._pick([life.request for life in self.lives.values()], pick)
        if request.state is SequenceState.RUNNING:
            self.scheduler.queues.share(request)

    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        """As if pages were short, at any moment."""
        self.scheduler.scheduler.queues.retract(self._pick(self._retractable(), pick))

    @precondition(lambda self: self.window)
    @rule(pick=PICK, luck=TOKENS, short=st.booleans())
    def relapse(self, pick: int, luck: abc.Sequence[int], short: bool) -> None:
        """Retracted in the middle of its prompt, and let in again while a chunk is still in flight."""
        while len(self.flights) >= self.window:
            self.resolve()
        self._plan(luck)
        halfway = [each for each in self._retractable() if each.key in self.scheduler.queues.prefilling]
        self.scheduler.scheduler.queues.retract(self._pick(halfway, pick))
        self._plan(luck)
        if short:
            self.run_out()
        else:
            self.resolve()

    @precondition(lambda self: self.window)
    @rule(pick=PICK, luck=TOKENS, retract=st.booleans())
    def shortage(self, pick: int, luck: abc.Sequence[int], retract: bool) -> None:
        """A step runs out of memory with others behind it, and who was in them may be retracted already."""
        while len(self.flights) <= self.window and self._plan(luck):
            pass
        if retract and (retractable := self._retractable()):
            self.scheduler.scheduler.queues.retract(self._pick(retractable, pick))
        if self.flights:
            self.run_out()

    def _retractable(self) -> list[Sequence]:
        active = [key for key, each in self.scheduler.queues.running.items() if not each.parked]
        spared = min(active, default=None)
        return [each for key, each in self.scheduler.queues.running.items() if key != spared]

    # -- laws -----------------------------------------------------------------------------------

    @invariant()
    def counted(self) -> None:
        check(self.scheduler.scheduler)
        audit(self.scheduler.scheduler)

    @invariant()
    def free_is_free(self) -> None:
        """No page and no slot is free while a step in flight touches it."""
        pages = {page for flight in self.flights for page in flight.touched}
        assert not pages & set(self.memory.pages._free), "a page is free and in flight"
        slots = {row.slot for flight in self.flights for row in flight.rows}
        assert not slots & set(self.memory.slots._free), "a slot is free and in flight"
        if self.memory.states is not None and self.memory.states.pool is not None:
            touched = {cell for flight in self.flights for cell in flight.states_touched}
            free = {self.memory.slots.total + item for item in self.memory.states.pool._free}
            assert not touched & free, "a snapshot is free and in flight"

    @invariant()
    def cache_is_true(self) -> None:
        """What the tree says is what the pages hold, written by steps that have resolved."""
        if self.memory.tree is None:
            return
        size, device = self.device.page_size, self.device
        stack: list[tuple[Node, list[Any]]] = [
            (root, [root.namespace]) for root in self.memory.tree._roots.values()
        ]
        while stack:
            node, tokens = stack.pop()
            keys = memoryview(node.key).cast("i").tolist()
            for at, token in enumerate(keys):
                tokens = [*tokens, token]
                cell = node.pages[at // size] * size + at % size
                assert device.cells[cell] == tuple(tokens), "a cached page holds something else"
                assert device.writer[cell] <= self.scheduler.resolved, "a cached page is still in flight"
            stack += [(child, tokens) for child in node.children.values()]
            if node.snapshot is not None:
                assert device.states is not None
                held = self.memory.slots.total + node.snapshot.item
                assert device.states[held] == tuple(tokens), "a snapshot is of another prefix"
                assert device.state_writer[held] <= self.scheduler.resolved, "a snapshot is still in flight"

    @invariant()
    def held(self) -> None:
        """What was lost of a hold does not come back."""
        for hold, left in self.holds.items():
            assert hold.num_pages <= left or self.memory.states is not None
            self.holds[hold] = hold.num_pages

    @invariant()
    def told(self) -> None:
        """What was delivered stays delivered, and everybody knows how far it is.

        Requests that have finished are looked at once, and again when all have.
        """
        for life in self.lives.values():
            request = life.request
            if request.key in self.settled:
                continue
            assert request.output_ids == life.delivered
            assert request.output.finish_reason == life.reason
            assert request.finished == (life.reason is not None) == (request.key in self.ended)
            if request.finished:
                assert not request.cursor.in_batch
                assert not request.kv.pages
                self.settled.add(request.key)
                continue
            assert request.pending == len(life.sampled) - len(life.delivered)
            assert request.length == len(request.prompt_ids) + len(life.sampled) <= request.max_length
            assert request.known == len(request.prompt_ids) + len(life.delivered)
            places = (request.key in self.scheduler.queues.running) + (
                request in self.scheduler.queues.waiting
            )
            assert places + (request.key in self.scheduler.queues.shelved) == 1
            assert (request.state is SequenceState.RUNNING) == (request.key in self.scheduler.queues.running)
        assert {each.key for each in self.scheduler.queues.unfinished()} == self.lives.keys() - self.ended

    @invariant()
    def led(self) -> None:
        """Whoever is waited for is computing."""
        for request in self.scheduler.queues.leaders._leaders.values():
            assert request.key in self.scheduler.queues.running
            assert not request.parked
            assert not request.cursor.prefilled

    def teardown(self) -> None:
        """Left alone, everything ends, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        unfinished = [life.request for life in self.lives.values() if life.reason is None]
        for request in unfinished:
            for waits in ParkedFor:
                self.scheduler.queues.unpark(request, waits)
        # One position a step for everybody, many times over: each may lose its pages again and again.
        bound = 20 + 40 * sum(request.max_length for request in unfinished)
        while self.scheduler.queues.has_unfinished or self.flights:
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
        self.settled.clear()
        self.told()
        check_idle(self.scheduler.scheduler)
        self.memory.flush()
        for hold in self.holds:
            self.memory.release_hold(hold)
        check_idle(self.scheduler.scheduler)
        assert self.memory.pages.free == self.num_pages
        assert self.memory.slots.free == self.memory.slots.total


def watched(machine: SchedulerMachine, scheduler: Scheduler) -> Scheduler:
    """The scheduler, which tells the machine of ends and retractions from inside."""

    class Watched(RequestQueues):
        __slots__ = ()

        def retract(self, request: Sequence) -> None:
            active = [each.key for each in self.running.values() if not each.parked]
            spared = request.parked or machine.starting_over or request.key != min(active)
            assert spared, "the eldest request was retracted"
            machine.retracted.append(request.key)
            super().retract(request)

        def finish(self, request: Sequence, reason: Any, error: BaseException | None = None) -> bool:
            first: bool = super().finish(request, reason, error)
            assert not (first and request.key in machine.ended), "a request ended twice"
            machine.ended.add(request.key)
            return first

    scheduler.queues.__class__ = Watched
    return scheduler
