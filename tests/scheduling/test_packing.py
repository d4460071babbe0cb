"""Packing and the policies: which requests it may reorder, when, and how long a request waits at most."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from aioinfer.config import policy_names
from aioinfer.scheduling.admission import Admitter, PrefixLeaders, StepBudget
from aioinfer.scheduling.audit import check_idle
from aioinfer.scheduling.reserve import Outlook
from aioinfer.scheduling.sequence import Sequence
from tests.scheduling.desk import Desk
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled

# -- what it may reorder -----------------------------------------------------------------------------


class Watched(Admitter):
    """Remembers the order of the queue when it was asked, and the ranks in it."""

    __slots__ = ("held_back", "order", "ranks")

    def choose(self, budget: StepBudget, room: int, outlook: Outlook, urgent: Sequence | None = None) -> Any:
        overdue, order = self._overdue(), list(self._policy.order())
        if urgent is None:
            self.order = sorted(order, key=lambda request: request is not overdue)
            self.ranks = {each.key: self._policy.rank(each) for each in order}
        return super().choose(budget, room, outlook, urgent)

    def _candidates(self, first: Sequence | None) -> Iterator[tuple[Sequence, Sequence | None]]:
        for request, leader in super()._candidates(first):
            if leader is not None:
                self.held_back.append(request)
            yield request, leader


def plan_lawfully(desk: Desk) -> int:
    """Plan a step and assert that its admissions obey the policy; how many requests were passed over."""
    scheduler, memory, config = desk.scheduler, desk.memory, desk.scheduler.config
    admitter, waiting, before = scheduler.admitter, scheduler.queues.waiting, len(desk.flights)
    assert isinstance(admitter, Watched)
    admitter.order, admitter.ranks, admitter.held_back = [], {}, []
    desk.plan()
    order, ranks = admitter.order, admitter.ranks
    last = max((at for at, each in enumerate(order) if each not in waiting), default=0)
    passed = [each for each in order[:last] if each in waiting and each not in admitter.held_back]
    if not passed:
        return 0
    assert config.admission == "pack", "fifo changed the order"
    for at, each in enumerate(order):
        ahead = {ranks[other.key] for other in order[:at] if other in passed}
        assert each in waiting or ahead <= {ranks[each.key]}, "the two are not of equal rank"
    step = desk.flights[before]
    left = (config.max_prefill_tokens or config.step_tokens) - sum(len(row.ids) for row in step.prefilling)
    assert min(left, config.step_tokens - step.num_tokens) < 4, "there were tokens for it"
    free = config.running_requests - len(scheduler.queues.running)
    assert len(passed) <= free, "a later request took the slot of an earlier one"
    pages = sum(memory.pages.pages_for(each.length) - memory.lookup(each)[0] for each in passed)
    assert pages <= memory.available, "a later request took the pages of an earlier one"
    return len(passed)


def arrivals(dice: random.Random, desk: Desk) -> None:
    for _ in range(dice.choice([0, 0, 1, 5])):
        base = dice.choice([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8] * 2, [9, 9, 9, 9]])
        tail = [dice.randint(50, 1000) for _ in range(dice.choice([1, 2, 3, 20, 40]))]
        key, priority = dice.choice([None, "a", "b"]), dice.randint(0, 1)
        desk.submit([*base, *tail], dice.choice([1, 2, 8]), priority=priority, routing_key=key)


@rest(SECONDS)
@pytest.mark.parametrize("admission", ["fifo", "pack"])
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("seeds", grid([range(6)], [range(6, 100)], SIMULATION))
def test_a_policy_is_obeyed(policy: str, admission: str, seeds: range) -> None:
    """Only equals change places, only where tokens are short, and none loses its slot or pages by it."""
    passed = 0
    for seed in seeds:
        dice = random.Random(seed)
        desk = Desk(
            policy,
            pages=dice.choice([20, 40, 200]),
            running=dice.choice([1, 3, 8, 16]),
            max_step_tokens=dice.choice([16, 24, 40]),
            max_prefill_tokens=dice.choice([None, None, 8, 16]),
            chunk_size=dice.choice([8, 16, 40]),
            admission=admission,
            lookahead=dice.choice([2, 5, 64]),
            max_passed_over=dice.choice([1, 4]),
            new_token_ratio=dice.choice([0.0, 0.5]),
            preemption=dice.random() < 0.2,
        )
        queues = desk.scheduler.queues
        desk.scheduler.admitter = Watched(queues.waiting, desk.memory, queues.leaders, desk.scheduler.config)
        for _ in range(40):
            arrivals(dice, desk)
            passed += plan_lawfully(desk)
            if len(desk.flights) > 1 or dice.random() < 0.5:
                desk.resolve()
        desk.resolve()
        desk.finish(2000)
        check_idle(desk.scheduler)
    may = admission == "pack" and policy != "random"
    assert bool(passed) == may, f"{passed} were passed over"


def test_what_the_higher_ones_leave_goes_to_the_lower_ones() -> None:
    desk = Desk(
        "priority", running=8, max_step_tokens=16, chunk_size=16, admission="pack", force_fifo_every=0
    )
    long, short = desk.submit(30), desk.submit(2)
    high = desk.submit(5, priority=9)
    step = desk.scheduler.plan()
    assert step is not None
    # The chunk ends with a page.
    assert [(row.sequence, row.length) for row in step.prefilling] == [(high, 5), (long, 8), (short, 2)]


def test_packing_lets_in_what_fits_whole_and_gives_the_rest_to_the_first() -> None:
    desk = Desk(max_step_tokens=16, chunk_size=16, admission="pack", force_fifo_every=0)
    long, *short = desk.submit(40), desk.submit(5), desk.submit(3)
    step = desk.scheduler.plan()
    assert step is not None
    assert [(row.sequence, row.length) for row in step.prefilling] == [
        (long, 8), (short[0], 5), (short[1], 3)
    ]  # fmt: skip


def test_packing_fills_the_step_with_chunks_of_long_prompts() -> None:
    """A prompt takes no more of a step than a chunk: there is room for four, not for two."""
    desk = Desk(max_step_tokens=64, chunk_size=16, admission="pack", pages=200)
    requests = [desk.submit(40) for _ in range(4)]
    assert desk.plan() == requests
    assert desk.flights[-1].num_tokens == 64


# -- what else could take a place --------------------------------------------------------------------

COMMON = list(range(16))


@pytest.mark.parametrize("admission", ["fifo", "pack"])
@pytest.mark.parametrize(
    ("policy", "short"), [("fcfs", "slots"), ("priority", "slots"), ("priority", "pages")]
)
def test_a_request_that_waits_for_a_prefix_keeps_its_place(policy: str, short: str, admission: str) -> None:
    """One of lower priority would hold the slot, or the pages, long after the prefix is there."""
    limits = {"running": 2} if short == "slots" else {"running": 8, "pages": 24}
    desk = Desk(policy, chunk_size=8, admission=admission, **limits)
    desk.submit([*COMMON, *COMMON, 100], 9 if short == "slots" else 4, priority=9)
    desk.round()
    rest = [101] if short == "slots" else range(200, 216)
    held = desk.submit([*COMMON, *COMMON, *rest], 2, priority=9)
    low = desk.submit(3 if short == "slots" else 44, 50)
    while not held.output_ids:
        assert low not in desk.round()
    assert held.output.cached_tokens == 32
    desk.finish()


def test_of_the_parked_the_least_important_loses_its_place() -> None:
    desk = Desk("priority", running=3)
    high, low, newest = [desk.submit(4, 9, priority=priority) for priority in (2, 0, 2)]
    desk.round()
    for request in (high, low, newest):
        desk.scheduler.queues.park(request)
    waiting = desk.submit(4, 2)
    assert waiting in desk.round()
    assert [each.recovery.retractions for each in (high, low, newest)] == [0, 1, 0]
    for _ in range(2):
        desk.submit(4, 2)
        desk.round()
    assert newest.recovery.retractions >= high.recovery.retractions
    for request in (high, low, newest):
        desk.scheduler.queues.unpark(request)
    desk.finish()


# -- bounds on waiting -------------------------------------------------------------------------------

PASSES = 5


def favoured(desk: Desk, policy: str) -> None:
    """A request that the policy prefers to the victim, as far as it may."""
    cached = [7] * 8 if policy in ("lpm", "dfs-weight") else []
    deadline = 1e6 if policy == "slack" else None
    output = 3 if policy != "lof" else 30
    desk.submit([*cached, desk._key], output, priority=1, routing_key="hot", deadline=deadline)


def rounds_of_others(desk: Desk, victim: Sequence, most: int) -> int:
    """Rounds in which others were admitted while the victim waited."""
    admitted, others = desk.scheduler.queues.counters, 0
    for _ in range(most):
        for _ in range(4):
            favoured(desk, desk.scheduler.queues.waiting.name)
        before = admitted.admitted
        desk.round()
        if victim.kv.slot or victim.finished:
            return others
        others += admitted.admitted > before
    raise AssertionError(f"it never got in, while others did in {others} rounds")


@pytest.mark.parametrize("short", ["slots", "tokens", "pages"])
@pytest.mark.parametrize("preemption", grid([False], [True]))
@pytest.mark.parametrize("admission", ["fifo", "pack"])
@pytest.mark.parametrize("policy", policy_names())
def test_the_bound_on_waiting_holds(policy: str, admission: str, preemption: bool, short: str) -> None:
    """A request that has n elders is passed over in (n + 1) * (max_passed_over + 1) rounds at most, and in
    n + 1 more with preemption."""
    limits: dict[str, dict[str, Any]] = {
        "slots": {"running": 3, "pages": 400},
        "tokens": {"running": 16, "pages": 400, "max_step_tokens": 20, "max_prefill_tokens": 12},
        "pages": {"running": 16, "pages": 24},
    }
    desk = Desk(
        policy, admission=admission, max_passed_over=PASSES, force_fifo_every=0, chunk_size=12,
        preemption=preemption, **limits[short],
    )  # fmt: skip
    desk.submit([7] * 8, 1)
    desk.finish()
    for _ in range(4):
        favoured(desk, policy)
    desk.round()
    elders = [desk.submit(20, 3, priority=1) for _ in range(2)]
    victim = desk.submit(40, 3, priority=1)
    waiting = len(desk.scheduler.queues.unfinished())
    others = rounds_of_others(desk, victim, 2000)
    assert others <= waiting * (PASSES + 1 + preemption)
    if policy == "fcfs" and admission == "fifo":
        assert others <= len(elders)


@pytest.mark.parametrize("admission", ["fifo", "pack"])
def test_with_priorities_the_bound_holds_among_the_most_important(admission: str) -> None:
    """A lower priority waits for as long as higher ones come, and these do not wait for it."""
    desk = Desk("priority", running=2, admission=admission, max_passed_over=PASSES)
    low = desk.submit(4, 2)
    for _ in range(100):
        for _ in range(3):
            desk.submit(4, 2, priority=1)
        desk.round()
        assert not low.kv.slot
    assert not low.passed


def test_every_so_many_rounds_are_first_come_first_served() -> None:
    desk = Desk(running=32, pages=400, max_step_tokens=34, max_prefill_tokens=12, chunk_size=12,
                admission="pack", force_fifo_every=4, max_passed_over=1000)  # fmt: skip
    for _ in range(4):
        desk.submit(6, 1)
    long = desk.submit(12, 1)
    rounds = 0
    while long not in desk.round():
        for _ in range(3):
            desk.submit(6, 1)  # two of them fill the step
        rounds += 1
    assert desk.scheduler.admitter.forced_rounds
    assert 2 < rounds <= 3 * 4


def test_a_passed_over_request_goes_first_with_preemption_too() -> None:
    """Requests of higher priority that are first in the order would take its turn, one after the other."""
    desk = Desk("lof", running=2, preemption=True, max_passed_over=3, pages=200)
    desk.submit(4, 60)
    desk.submit(4, 60)
    desk.round()
    victim, others = desk.submit(4, 1), 0
    for number in range(600):
        desk.submit(4, 50, priority=1 + number)
        before = desk.scheduler.queues.counters.admitted
        if victim in desk.round():
            break
        others += desk.scheduler.queues.counters.admitted - before
    assert victim.finished
    assert others <= 3 * (3 + 2)


# -- what it costs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("short", grid(["tokens"], ["slots", "pages"]))
@pytest.mark.parametrize("admission", ["fifo", "pack"])
@pytest.mark.parametrize("policy", policy_names())
def test_a_plan_looks_at_a_bounded_part_of_the_queue(
    policy: str, admission: str, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookahead, running = 16, 32
    limits: dict[str, dict[str, Any]] = {
        "slots": {"pages": 4000},
        "tokens": {"pages": 4000, "max_prefill_tokens": 12},
        "pages": {"pages": 40},
    }
    desk = Desk(policy, running=running, lookahead=lookahead, admission=admission, **limits[short])
    looks = []
    mark = PrefixLeaders.mark

    def counted(self: PrefixLeaders, request: Sequence) -> object | None:
        looks.append(request.key)
        return mark(self, request)

    monkeypatch.setattr(PrefixLeaders, "mark", counted)
    for at in range(scaled(4096)):
        prompt = [*COMMON, at] if at % 3 else [at % 50] * (1 + at % 20)
        desk.submit(prompt, 1 + at % 4, priority=at % 5, routing_key="abc"[at % 3])
    for _ in range(12):
        looks.clear()
        step = desk.scheduler.plan()
        # Those that may be admitted, those that are held back, and those that run.
        assert len(looks) <= 2 * (running + lookahead) + 2
        if step is not None:
            desk.flights.append(step)
        desk.resolve()
