"""The policy slack: its order, what it takes for too late, and what it expects of a request."""

from __future__ import annotations

import random
from collections import abc
from typing import Any

import pytest

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.params import SamplingParams
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policies.slack import Slack
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Step
from aioinfer.scheduling.step_time import StepTime
from tests.scheduling.desk import Desk
from tests.sequences import new_sequence

#: seconds of a token, and of a prefill token
TOKEN, PREFILL = 0.01, 0.001


class Known(StepTime):
    """Whatever runs, a step takes as long, and a prompt by its length."""

    known = True  # type: ignore[assignment]

    def generating(self, rows: float, positions: float) -> float:
        return TOKEN

    def prefill(self, start: int, length: int, before: float = 0) -> float:
        return PREFILL * length


class Queue:
    """The policy alone."""

    def __init__(self, slots: int = 2, times: StepTime | None = None) -> None:
        self.policy = Slack(Memory(PageAllocator(64, 2), SlotPool(8)))
        self.times = Known(0.0) if times is None else times
        self.policy.plan_with(self.times, slots)

    def new(
        self, key: int, deadline: float | None, tokens: int = 10, prompt: int = 1, **options: Any
    ) -> Sequence:
        params = SamplingParams(max_tokens=tokens)
        ids = [key * 100 + at for at in range(prompt)]
        return new_sequence(key, ids, params, max_length=prompt + tokens, deadline=deadline, **options)

    def add(self, *arguments: Any, **options: Any) -> Sequence:
        sequence = self.new(*arguments, **options)
        self.policy.add(sequence)
        return sequence

    def start(self, sequence: Sequence) -> None:
        self.policy.remove(sequence)
        self.policy.started(sequence)

    def learn(self, tokens: int = 10, used: int = 10, times: int = 4) -> None:
        """Outputs that may have so many tokens and used some of them."""
        for key in range(1000, 1000 + times):
            sequence = self.add(key, None, tokens)
            self.start(sequence)
            sequence.output_ids += [1] * used
            sequence.output.finish("length")
            self.policy.stopped(sequence)

    @property
    def keys(self) -> list[int]:
        return [each.key for each in self.policy.order()]


# -- order -------------------------------------------------------------------------------------------


def test_the_request_with_least_slack_goes_first() -> None:
    queue = Queue()
    queue.add(1, 3.0, 10)  # 2.9 to spare
    queue.add(2, 4.0, 300)  # 1
    queue.add(3, 4.0, 10, prompt=1100)  # 2.8
    queue.add(4, 2.5, 10, arrival=1.0)  # it began later: 3.4
    assert queue.keys == [2, 3, 1, 4]


def test_before_steps_were_measured_the_nearest_deadline_goes_first() -> None:
    queue = Queue(times=StepTime(0.0))
    for key, deadline, tokens in ((1, 3.0, 10), (2, 4.0, 1000), (3, 2.0, 10)):
        queue.add(key, deadline, tokens)
    assert queue.keys == [3, 1, 2]


def test_what_has_no_deadline_goes_after_what_can_be_in_time_and_with_what_is_late() -> None:
    queue = Queue()
    queue.add(1, None)
    late = queue.add(2, 1.0)
    queue.add(3, None)
    queue.add(4, 9.0)
    assert queue.keys == [2, 4, 1, 3]
    queue.times.now = 0.95
    assert queue.keys == [4, 1, 2, 3], "0.05 seconds are not enough for ten tokens"
    assert queue.policy.rank(late) is queue.policy.rank(queue.add(5, None))
    queue.policy.remove(late)
    assert queue.keys == [4, 1, 3, 5]
    queue.policy.add(late)
    assert queue.keys == [4, 1, 2, 3, 5], "one that was retracted keeps its age"


def test_an_overload_does_not_make_all_of_it_late() -> None:
    """Half of what comes can be computed. The earliest deadline first would begin each one too late."""
    queue, ended, now = Queue(), dict[int, float](), 0.0
    waiting = {key: queue.add(key, 1.0 + 0.05 * key) for key in range(100)}
    while queue.keys:
        first = queue.keys[0]
        queue.policy.remove(waiting[first])
        now += 0.1
        ended[first] = queue.times.now = now
    met = [key for key, at in ended.items() if at <= 1.0 + 0.05 * key + 1e-6]
    assert len(met) >= 58, "of 60 that there was time for"
    assert len(ended) == 100


def test_deadlines_do_not_keep_a_request_without_one_waiting_for_ever() -> None:
    desk = Desk("slack", running=2, max_passed_over=5)
    victim, admitted = desk.submit(4, 2), desk.scheduler.queues.counters
    rounds = 0
    while not victim.kv.slot:
        for _ in range(3):
            desk.submit(4, 2, deadline=100.0)
        before = admitted.admitted
        desk.round()
        rounds += admitted.admitted > before
    assert 0 < victim.passed <= 5
    assert rounds <= 2 * (5 + 1)


# -- estimates ---------------------------------------------------------------------------------------


def test_a_request_alone_takes_its_prompt_and_its_tokens() -> None:
    queue = Queue()
    assert queue.policy.needed(queue.new(1, 5.0, 20, prompt=100), 0.0) == pytest.approx(0.1 + 0.2)


def test_those_in_front_take_their_time_and_those_behind_take_none() -> None:
    queue = Queue(slots=1)
    queue.start(queue.add(1, None, 30))
    queue.add(2, 1.0, 10)
    queue.add(3, 50.0, 10)
    queue.add(4, None, 10)
    new = queue.new(5, 2.0, 20, prompt=100)
    assert queue.policy.needed(new, 0.0) == pytest.approx(0.3 + 0.1 + 0.1 + 0.2)
    queue.times.now = 0.95
    assert queue.policy.needed(new, 0.95) == pytest.approx(0.3 + 0.1 + 0.2), "the first is late now"


def test_with_a_free_slot_only_the_prompts_in_front_take_time() -> None:
    queue = Queue(slots=4)
    queue.start(queue.add(1, None, 30, prompt=50))
    queue.add(2, 1.0, 10, prompt=200)
    assert queue.policy.needed(queue.new(5, 2.0, 20), 0.0) == pytest.approx(0.05 + 0.2 + 0.001 + 0.2)


def test_many_in_front_are_taken_for_as_many_alike() -> None:
    queue = Queue(slots=1)
    for key in range(1000):
        queue.add(key, 1.0, 10)
    assert queue.policy.needed(queue.new(5000, 500.0), 0.0) == pytest.approx(1000 * 0.1 + 0.1, rel=0.02)


def test_outputs_are_expected_to_be_as_long_as_others_of_their_kind() -> None:
    queue = Queue()
    queue.learn(tokens=1000, used=100, times=200)
    assert queue.policy.needed(queue.new(1, 5.0, 1000), 0.0) == pytest.approx(1.0, rel=0.1)
    assert queue.policy.needed(queue.new(1, 5.0, 20), 0.0) == pytest.approx(0.2, abs=0.002), "another kind"


def test_tokens_of_drafts_and_blocks_are_expected_in_the_time_that_they_take() -> None:
    queue = Queue()
    for key in range(200):
        sequence = queue.add(key, None, 100, arrival=queue.times.now)
        queue.start(sequence)
        sequence.output.admitted_at = queue.times.now
        sequence.output_ids += [1] * 100
        queue.times.now += 100 * TOKEN / 4 + PREFILL
        queue.policy.stopped(sequence)
    assert queue.policy.needed(queue.new(1000, 5.0, 100), queue.times.now) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("how", ["abort", None])
def test_outputs_that_are_cut_short_tell_that_they_may_be_longer_and_not_shorter(how: Any) -> None:
    queue = Queue()

    def cut(used: int) -> None:
        for key in range(200):
            sequence = queue.add(key, None, 1000)
            queue.start(sequence)
            sequence.output_ids += [1] * used
            if how is not None:
                sequence.output.finish(how)
            queue.policy.stopped(sequence)

    cut(100)
    assert queue.policy.needed(queue.new(1, 50.0, 1000), 0.0) == pytest.approx(10.0, abs=0.01)
    queue.learn(tokens=1000, used=100, times=200)
    assert queue.policy.needed(queue.new(1, 50.0, 1000), 0.0) == pytest.approx(1.0, rel=0.1)
    cut(900)
    assert queue.policy.needed(queue.new(1, 50.0, 1000), 0.0) == pytest.approx(9.0, rel=0.1)


def test_what_is_rewritten_does_not_tell_how_long_a_token_takes() -> None:
    queue = Queue()
    for key in range(200):
        sequence = queue.add(key, None, 100)
        sequence.output.admitted_at = queue.times.now
        queue.times.now += 50.0  # and was rewound to its beginning
        queue.start(sequence)
        sequence.output_ids += [1] * 100
        queue.times.now += 1.0
        queue.policy.stopped(sequence)
    assert queue.policy.needed(queue.new(1000, 5.0, 100), queue.times.now) == pytest.approx(1.0, abs=0.01)


# -- refusals ----------------------------------------------------------------------------------------


def test_nothing_is_too_late_before_steps_and_outputs_were_seen() -> None:
    queue = Queue()
    assert queue.policy.late(queue.new(1, 0.05), 0.0) == 0.0
    queue.learn(times=3)
    assert queue.policy.late(queue.new(1, 0.05), 0.0) == 0.0
    queue.learn(times=1)
    queue.start(queue.add(2, None, 1))
    assert queue.policy.late(queue.new(1, 0.05), 0.0) == pytest.approx(0.052, abs=0.001)
    assert queue.policy.late(queue.new(1, 0.05), 0.02) == pytest.approx(0.072, abs=0.001)
    assert queue.policy.late(queue.new(1, 0.2), 0.0) == 0.0
    assert queue.policy.late(queue.new(1, None), 0.0) == 0.0
    fresh = Queue(times=StepTime(0.0))
    fresh.learn()
    assert fresh.policy.late(fresh.new(1, 0.05), 0.0) == 0.0


def test_an_idle_engine_does_not_refuse_for_ever_what_it_once_found_slow() -> None:
    queue = Queue()
    queue.learn()
    refused = 0
    while queue.policy.late(queue.new(1, 0.05), 0.0):
        refused += 1
    assert 20 < refused < 50
    queue.start(queue.add(2, None))
    for _ in range(100):
        assert queue.policy.late(queue.new(1, 0.05), 0.0), "what runs teaches it what is true"


# -- what it learns from -----------------------------------------------------------------------------


def test_steps_are_measured_where_prefill_has_no_bound() -> None:
    desk = Desk("slack", step_time_target=0.0)
    desk.submit(8, 40)
    for _ in range(20):
        step = desk.launch()
        desk.scheduler.times.observe(step, 0.01)
        desk.bring(step)
    assert desk.scheduler.times.known


def cost(step: Step) -> float:
    rows = step.generating
    decoding = 0.008 + 4e-4 * rows.num_tokens + 2e-7 * float(rows.starts.sum())
    return decoding + sum(row.length * (2e-4 + 1e-8 * row.start) for row in step.prefilling)


def computed(desk: Desk, until: abc.Callable[[], bool], clock: list[float]) -> None:
    while not until():
        step = desk.launch()
        desk.scheduler.times.observe(step, cost(step))
        clock[0] += cost(step)
        desk.scheduler.times.now = clock[0]
        desk.bring(step)


def estimate_against_time(seed: int) -> float:
    """Of one more request on a device that is loaded with some of all kinds, when nothing more comes."""
    desk = Desk("slack", pages=4000, page_size=16, running=8, max_step_tokens=256, prefix_cache=False)
    dice, clock = random.Random(seed), [0.0]
    policy = desk.scheduler.queues.waiting
    assert isinstance(policy, Slack)

    def request(deadline: float | None) -> Sequence:
        prompt, tokens = dice.choice([16, 200, 600]), dice.choice([20, 60, 120])
        return desk.submit(prompt, tokens, deadline=deadline, arrival=clock[0])

    for _ in range(30):
        request(dice.choice([None, 100.0]))
    computed(desk, lambda: len(policy) <= 6, clock)
    last, began = request(90.0), clock[0]
    expected = policy.needed(last, began)
    computed(desk, lambda: last.finished, clock)
    return expected / (clock[0] - began)


def test_the_estimate_is_about_what_a_request_takes() -> None:
    found = sorted(map(estimate_against_time, range(20)))
    assert found[10] == pytest.approx(1.0, abs=0.2)
    assert sum(abs(each - 1) for each in found) / len(found) < 0.35
