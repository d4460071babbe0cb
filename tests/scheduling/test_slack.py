"""The policy slack: its order, and what it takes for too late."""

from __future__ import annotations

from typing import Any

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.params import SamplingParams
from aioinfer.scheduling.forecast import Forecast
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policies.slack import Slack
from aioinfer.scheduling.reserve import NewTokenRatio
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step_time import StepTime
from tests.scheduling.desk import Desk
from tests.sequences import new_sequence

#: seconds of a token, and of a prefill token
TOKEN, PREFILL = 0.01, 0.001


class Known(StepTime):
    """Whatever runs, a step takes as long, and a prompt by its length."""

    known = True

    def generating(self, rows: float, positions: float) -> float:
        return TOKEN

    def prefill(self, start: int, length: int, before: float = 0) -> float:
        return PREFILL * length


class Queue:
    """The policy alone."""

    def __init__(self, times: StepTime | None = None) -> None:
        memory, config = Memory(PageAllocator(64, 2), SlotPool(8)), EngineConfig()
        self.policy = Slack(memory)
        self.times = Known(0.0) if times is None else times
        self.policy.plan_with(Forecast(config, memory, self.times, NewTokenRatio(config)))

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
