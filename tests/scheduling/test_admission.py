"""Who is let in and when: sharing within a batch, preemption, and what is kept back."""

from __future__ import annotations

from typing import Any

import pytest

from aioinfer.cache.namespace import Namespace
from aioinfer.config import policy_names
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.scheduling.audit import audit, check_idle
from aioinfer.scheduling.step import Outcome
from tests.scheduling.desk import Desk

# -- sharing within a batch --------------------------------------------------------------------------

COMMON = list(range(16))


def test_one_computes_a_shared_prefix_and_the_others_find_it() -> None:
    desk = Desk()
    requests = [desk.submit([*COMMON, 100 + at]) for at in range(3)]
    assert desk.round() == requests[:1]
    assert desk.round() == requests, "the prefix is there: all go on"
    assert [request.output.cached_tokens for request in requests] == [0, 16, 16]


SPLIT = [*COMMON, *range(300, 312)]


@pytest.mark.parametrize(
    ("shared", "chunk_size", "launched"),
    [(COMMON, 64, 3), ([*COMMON, *range(16, 32)], 8, 5), (SPLIT, 64, 2)],
    ids=["whole", "in chunks", "where a cached prefix is split"],
)
def test_the_others_wait_while_a_prefix_is_in_flight(
    shared: list[int], chunk_size: int, launched: int
) -> None:
    """The leader, which decodes already, still leads; also when its first chunk has resolved."""
    desk = Desk(chunk_size=chunk_size)
    if shared is SPLIT:
        desk.submit([*COMMON, *range(200, 208)], 1)
        desk.finish()
    leader, follower = desk.submit([*shared, 100], 9), desk.submit([*shared, 101], 9)
    for _ in range(launched):
        assert desk.plan() == [leader]
    if chunk_size == 8:
        desk.bring(desk.flights.pop(0))
        assert desk.plan() == [leader], "the rest of the prefix is being computed"
    desk.resolve()
    assert desk.plan() == [leader, follower]
    assert follower.output.cached_tokens == len(shared)


@pytest.mark.parametrize("what", ["abort", "retract", "park"])
def test_when_the_leader_goes_another_takes_its_place(what: str) -> None:
    desk = Desk(chunk_size=8)
    eldest = desk.submit(3, 40)
    desk.round()
    leader, *others = [desk.submit([*COMMON, *range(16, 32), 100 + at]) for at in range(3)]
    assert desk.plan() == [eldest, leader]
    if what == "abort":
        desk.scheduler.finish(leader, "abort")
    elif what == "park":
        desk.scheduler.queues.park(leader)
    else:
        desk.scheduler.queues.retract(leader)
    rows = desk.round()
    assert len(rows) == 2, "one of those that waited goes on, and one only"
    assert rows[1] in [leader, *others]
    desk.finish()
    if what == "park":
        assert not leader.finished
        desk.scheduler.queues.unpark(leader)
        desk.finish()
    assert all(request.finished for request in others)
    check_idle(desk.scheduler)
    assert not desk.scheduler.queues.leaders._leaders


def test_a_flushed_leader_holds_nobody_back() -> None:
    """What it computes will never be found: waiting for it would be for nothing."""
    desk = Desk(chunk_size=4)
    desk.submit([*COMMON, *range(16, 32), 100])
    desk.round()
    desk.memory.flush()
    follower = desk.submit([*COMMON, *range(16, 32), 101])
    desk.round()
    desk.round()
    assert follower in desk.round()


def test_namespaces_share_nothing_and_wait_for_nobody() -> None:
    desk = Desk()
    one, other = desk.submit([*COMMON, 1]), desk.submit([*COMMON, 1], namespace=Namespace("tenant"))
    assert desk.round() == [one, other]
    third = desk.submit([*COMMON, 1], namespace=Namespace("tenant"))
    desk.round()
    assert other.output.cached_tokens == 0
    assert third.output.cached_tokens == 16


# -- preemption --------------------------------------------------------------------------------------


def test_a_more_important_request_takes_the_place_of_a_less_important_one() -> None:
    desk = Desk("priority", running=2, preemption=True)
    eldest, low = desk.submit(4, 20), desk.submit(4, 20)
    desk.round()
    high = desk.submit(4, 3, priority=1)
    assert desk.round() == [eldest, high]
    assert low.recovery.retractions == 1
    desk.round()
    desk.round()
    assert high.finished
    assert low in desk.round()
    desk.finish()
    assert low.recovery.retractions == 1
    assert eldest.recovery.retractions == 0, "the eldest always goes on"


def test_equals_do_not_displace_each_other() -> None:
    desk = Desk("priority", running=1, preemption=True)
    first = desk.submit(4, 5, priority=1)
    desk.round()
    desk.submit(4, 5, priority=1)
    assert desk.round() == [first]
    assert desk.scheduler.queues.counters.preemptions == 0


@pytest.mark.parametrize("policy", policy_names())
def test_a_victim_does_not_take_back_its_place(policy: str) -> None:
    """Under most policies it queues up before the one that displaced it. Taking turns at it, both would
    lose all they computed, in every step."""
    desk = Desk(policy, running=2, preemption=True, prefix_cache=False, chunk_size=4)
    desk.submit(4, 30, routing_key="a")
    low = desk.submit(12, 18, routing_key="a")
    for _ in range(4):
        desk.round()
    high = desk.submit(6, 10, priority=1)
    desk.finish()
    assert low.recovery.retractions <= 1
    assert high.recovery.retractions == 0


@pytest.mark.parametrize("admission", ["fifo", "pack"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_victim_does_not_come_back_before_there_is_place_for_both(policy: str, admission: Any) -> None:
    """Its pages were not enough, and the eldest cannot be displaced: who was displaced for nothing stays
    out until the other is in, or it would be displaced again in every step."""
    desk = Desk(
        policy, pages=10, preemption=True, admission=admission, mixed=False, step_priority="prefill",
        prefix_cache=False, chunk_size=4, force_fifo_every=0,
    )  # fmt: skip
    eldest, low = desk.submit(16, 6), desk.submit(8, 4)
    for _ in range(7):
        desk.round()
    desk.submit(28, 4, priority=1)
    desk.finish()
    assert eldest.recovery.retractions == 0
    assert low.recovery.retractions <= 1


def test_nobody_is_displaced_for_nothing() -> None:
    """The eldest keeps what the other would need; those beside it may as well go on."""
    desk = Desk("priority", pages=12, preemption=True, prefix_cache=False)
    eldest, low = desk.submit(24, 8), desk.submit(4, 4)
    desk.round()
    high = desk.submit(24, 4, priority=1)
    while not low.finished:
        assert high not in desk.round()
    assert low.recovery.retractions == 0
    desk.finish()
    assert eldest.recovery.retractions == 0


def test_preemption_counts_what_admission_keeps_back() -> None:
    """Else nobody is displaced, since there are pages, and nobody admitted, since they are kept back."""
    desk = Desk("priority", pages=16, preemption=True, new_token_ratio=1.0, min_new_token_ratio=1.0)
    desk.submit(4, 12)
    desk.submit(4, 28)
    assert len(desk.round()) == 2
    high = desk.submit(4, 20, priority=1)
    assert high in desk.round()


# -- what is kept back -------------------------------------------------------------------------------


def test_the_ratio_rises_with_a_retraction_and_decays_from_there() -> None:
    desk = Desk(
        pages=6, new_token_ratio=0.2, min_new_token_ratio=0.1, new_token_ratio_decay=0.01, prefix_cache=False
    )
    ratio = desk.scheduler.ratio
    assert ratio.value == 0.2
    desk.submit(7, 17)
    desk.submit(7, 17)
    desk.round()
    assert ratio.value == pytest.approx(0.19)
    seen = [ratio.value]
    while not desk.scheduler.queues.counters.retractions:
        desk.round()
        seen.append(ratio.value)
    assert seen[:-1] == sorted(seen[:-1], reverse=True)
    assert seen[-1] == pytest.approx((1 + seen[-2]) / 2 - 0.01), "half-way to one, then a step of decay"
    desk.finish()
    assert 0.1 <= ratio.value < seen[-1]


def test_an_idle_engine_forgets_what_it_learned_of_the_ratio() -> None:
    desk = Desk(pages=6, new_token_ratio=0.2, min_new_token_ratio=0.1, prefix_cache=False)
    ratio = desk.scheduler.ratio
    for _ in range(2):
        desk.submit(7, 17)
    while not desk.scheduler.queues.counters.retractions:
        desk.round()
    while desk.scheduler.queues.has_unfinished:
        assert ratio.value != 0.2, "it was forgotten while requests run or wait"
        desk.round()
    desk.submit(7, 1)
    assert ratio.value == 0.2


def test_pages_for_tokens_to_come_are_kept_back() -> None:
    """Two whose outputs would not fit together run one after the other, and nobody is retracted."""
    desk = Desk(pages=8, new_token_ratio=1.0, min_new_token_ratio=1.0, prefix_cache=False)
    first, second = desk.submit(8, 20), desk.submit(8, 20)
    while not first.finished:
        assert second not in desk.round()
    desk.finish()
    assert desk.scheduler.queues.counters.retractions == 0


# -- more of preemption ------------------------------------------------------------------------------


def test_a_still_more_important_request_overtakes_the_one_that_waits_for_its_place() -> None:
    desk = Desk("priority", running=2, preemption=True)
    eldest, low = desk.submit(4, 20), desk.submit(4, 20)
    desk.plan()
    high = desk.submit(4, 3, priority=1)
    desk.plan()
    assert low.recovery.retractions == 1
    assert high.state.value == "running"
    highest = desk.submit(4, 3, priority=2)
    assert desk.plan() == [eldest, highest]
    assert high.recovery.retractions == 1
    desk.resolve()
    desk.finish()
    assert all(request.finished for request in (eldest, low, high, highest))


def test_a_request_that_waits_for_a_prefix_displaces_nobody() -> None:
    desk = Desk("priority", running=3, preemption=True)
    desk.submit(4, 20)
    low = desk.submit(4, 20)
    desk.plan()
    leader = desk.submit([*COMMON, 1], 5, priority=1)
    desk.plan()
    follower = desk.submit([*COMMON, 2], 5, priority=1)
    desk.plan()
    assert low.recovery.retractions == 0, "the prefix of the other is in flight"
    desk.resolve()
    desk.plan()
    assert low.recovery.retractions == 1
    assert follower.output.cached_tokens == 16
    desk.resolve()
    desk.finish()
    assert leader.finished


# -- parked, retracted, spoiled ------------------------------------------------------------------------


def test_parked_requests_give_way_to_those_that_can_run() -> None:
    desk = Desk(running=2, pages=8)
    parked = [desk.submit(12, 4), desk.submit(12, 4)]
    desk.round()
    for request in parked:
        desk.scheduler.queues.park(request)
    assert desk.round() == []
    third = desk.submit(4, 4)
    assert desk.round() == [third]
    assert sum(request.recovery.retractions for request in parked) == 1, "one of them was enough"
    for request in parked:
        desk.scheduler.queues.unpark(request)
    desk.finish()
    assert all(len(request.output_ids) == 4 for request in parked)
    check_idle(desk.scheduler)


def test_a_request_retracted_before_its_last_token_is_read_still_ends() -> None:
    desk = Desk()
    eldest, ending = desk.submit(4, 9), desk.submit(4, 2)
    desk.plan()
    desk.plan()
    assert ending.length == ending.max_length
    desk.scheduler.queues.retract(ending)
    assert desk.plan() == [eldest], "there is nothing left to compute for it"
    desk.resolve()
    assert ending.output.finish_reason == "length"
    assert ending.output_ids == [42, 42]
    desk.finish()
    check_idle(desk.scheduler)


@pytest.mark.parametrize("retracted", [False, True])
def test_what_led_to_bad_logits_is_not_shared(retracted: bool) -> None:
    """Its earlier chunks were committed before anybody could know."""
    desk = Desk(chunk_size=8)
    desk.submit(4, 40)
    desk.round()
    prompt = list(range(20))
    spoiled = desk.submit(prompt)
    while spoiled.pending == 0:
        desk.plan()
    last = desk.flights.pop()
    desk.resolve()
    assert desk.memory.tree is not None
    assert desk.memory.tree.match(spoiled.token_key(0, 16)) == 4
    if retracted:
        desk.scheduler.queues.retract(spoiled)
    tokens = [BAD_LOGITS if row.sequence is spoiled else 42 for row in last.rows]
    desk.scheduler.resolve(last, Outcome(tokens))
    assert isinstance(spoiled.output.error, FloatingPointError)
    again = desk.submit(prompt)
    desk.round()
    assert again.output.cached_tokens == 0
    desk.finish()
    audit(desk.scheduler)
