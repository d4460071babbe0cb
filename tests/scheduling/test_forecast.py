"""What is expected of a new request: its first token and its end, from what runs and what goes before it."""

from __future__ import annotations

import random
from collections import abc
from typing import Any

import pytest

from aioinfer.scheduling.costs import Sizes
from aioinfer.scheduling.forecast import Forecast, Late, Prediction
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Step
from aioinfer.scheduling.step_time import StepTime
from tests.scheduling.desk import Desk

#: seconds of a step, and of a prefill token
TOKEN, PREFILL = 0.01, 0.001


class Known(StepTime):
    """Whatever runs, a step takes as long, and a prompt by its length."""

    known = True

    def seconds(self, sizes: Sizes) -> float:
        return TOKEN + PREFILL * sizes.tokens

    def prefill(self, start: int, length: int, before: float = 0) -> float:
        return PREFILL * length


class World(Desk):
    """A desk whose steps take what they are known to take; by default all outputs use all they may have."""

    def __init__(self, policy: str = "fcfs", *, times: StepTime | None = None, **limits: Any) -> None:
        options = {"running": 2, "pages": 4000, "page_size": 16, "max_step_tokens": 4096, "chunk_size": 4096}
        options |= {"prefix_cache": False, "overlap_steps": 0}
        super().__init__(policy, times=Known(0.0) if times is None else times, **{**options, **limits})
        self.times = self.scheduler.times

    @property
    def forecast(self) -> Forecast:
        return self.scheduler.forecast

    def learn(self, tokens: int = 10, used: int | None = None, times: int = 4, end: Any = "length") -> None:
        """Outputs that may have so many tokens and used some of them."""
        for _ in range(times):
            sequence = self.new(1, tokens)
            sequence.output_ids += [1] * (tokens if used is None else used)
            sequence.output.finish_reason = end
            self.forecast.ended(sequence)

    def run(self, steps: int = 1, took: abc.Callable[[Step], float] | None = None) -> None:
        for _ in range(steps):
            step = self.launch()
            seconds = self.times.seconds(Sizes.of(step)) if took is None else took(step)
            if took is not None:
                self.times.observe(step, seconds)
            self.times.now += seconds
            self.bring(step)

    def expect(self, prompt: int = 1, tokens: int = 10, **options: Any) -> Prediction:
        sequence = self.new(prompt, tokens, **options)
        found = self.forecast.expect(self.scheduler.queues, sequence, self.times.now)
        assert found is not None
        return found

    def late(self, **options: Any) -> Late | None:
        sequence = self.new(1, 10, arrival=self.times.now, **options)
        return self.forecast.late(self.scheduler.queues, sequence, self.times.now)


# -- what goes before it -----------------------------------------------------------------------------


def test_a_request_alone_takes_its_prompt_and_its_tokens() -> None:
    world = World()
    world.learn(20)
    found = world.expect(100, 20)
    assert found.first == pytest.approx(TOKEN + 0.1)
    assert found.end == pytest.approx(TOKEN + 0.1 + 19 * TOKEN)


def test_it_waits_for_a_slot_behind_what_came_before_it() -> None:
    world = World(running=1)
    world.learn(30)
    world.learn(10)
    world.submit(1, 30)
    world.run()  # 29 steps to go
    world.submit(1, 10)
    assert world.expect(100).first == pytest.approx(0.29 + 0.101 + 0.11, abs=1e-6)
    world.run(29)
    assert world.expect(100).first == pytest.approx(0.101 + 0.11, abs=1e-6)


def test_with_a_free_slot_only_the_prompts_in_front_take_time() -> None:
    world = World(running=4)
    world.learn(30)
    world.submit(50, 30)
    world.submit(200, 30)
    assert world.expect(1, 10).first == pytest.approx(TOKEN + 0.251)


def test_the_limits_of_a_step_make_prompts_wait() -> None:
    world = World(running=4, chunk_size=64, max_step_tokens=64, max_prefill_tokens=64)
    world.submit(640, 1)
    assert world.expect(64, 1).first == pytest.approx(11 * (TOKEN + 0.064))
    assert World(running=4, chunk_size=64).expect(640, 1).first == pytest.approx(10 * (TOKEN + 0.064))


def test_a_target_of_the_steps_makes_prompts_wait_beside_what_generates() -> None:
    world = World(running=4, times=Known(0.05))
    world.learn(2000)
    world.submit(1, 2000)
    world.run()
    assert world.expect(400, 10).first == pytest.approx(10 * 0.05, rel=0.15)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_slot_that_comes_free_is_seen_as_late_as_steps_are_planned_ahead(overlap: int) -> None:
    world = World(running=1, overlap_steps=overlap)
    world.learn(30)
    world.submit(1, 30)
    world.run()
    assert world.expect(1).first == pytest.approx((29 + 1) * TOKEN + PREFILL, abs=1e-6)  # nothing else runs
    world = World(running=2, overlap_steps=overlap)
    world.learn(30)
    world.learn(2000)
    world.submit(1, 30)
    world.submit(1, 2000)
    world.run()
    assert world.expect(1).first == pytest.approx((29 + 1 + overlap) * TOKEN + PREFILL, abs=1e-6)


def test_steps_in_flight_come_first() -> None:
    world = World(running=4, overlap_steps=1)
    world.submit(100, 10)
    world.plan()
    world.plan()
    assert world.expect(1).first == pytest.approx(0.11 + TOKEN + TOKEN + PREFILL)
    world.times.now -= 0.05
    sequence = world.new(1)
    found = world.forecast.expect(world.scheduler.queues, sequence, world.times.now + 0.05)
    assert found is not None
    assert found.first == pytest.approx(0.06 + TOKEN + TOKEN + PREFILL)


def test_pages_make_it_wait_as_well() -> None:
    world = World(running=4, pages=10, page_size=16)
    world.learn(60)
    world.submit(100, 60)
    world.run()
    assert world.expect(10, 10).first < 0.05
    assert world.expect(100, 10).first == pytest.approx(0.59 + 0.11, abs=0.02)


def test_what_goes_behind_it_takes_no_time() -> None:
    world = World("priority", running=1)
    world.learn(10)
    world.submit(1, 10, priority=1)
    world.run()
    for priority in (0, 1, 2):
        world.submit(1, 10, priority=priority)
    waits = [world.expect(1, 10, priority=priority).first for priority in (3, 2, 1, 0)]
    assert waits == [pytest.approx(0.09 + ahead * 0.101 + 0.011, abs=1e-6) for ahead in range(4)]


def test_with_preemption_what_is_less_important_is_not_in_the_way() -> None:
    world = World("priority", running=1, preemption=True)
    world.learn(1000)
    world.submit(1, 1000)
    world.run()
    assert world.expect(1, 10, priority=1).first == pytest.approx(TOKEN + PREFILL)
    assert world.expect(1, 10).first > 9.0


def test_with_slack_it_goes_by_its_latest_start() -> None:
    world = World("slack", running=1)
    world.learn(10)
    world.submit(1, 10)
    world.run()
    world.submit(1, 10, deadline=1.0)
    world.submit(1, 10)
    waits = [world.expect(1, 10, deadline=deadline).first for deadline in (0.5, 2.0, None)]
    assert waits == [pytest.approx(0.09 + ahead * 0.101 + 0.011, abs=1e-6) for ahead in range(3)]


def test_many_in_front_are_taken_for_as_many_alike() -> None:
    world = World(running=1)
    world.learn(10)
    for _ in range(1000):
        world.submit(1, 10)
    assert world.expect(1, 10).first == pytest.approx(1000 * 0.101, rel=0.01)


# -- how long outputs are ----------------------------------------------------------------------------


def test_outputs_are_expected_to_be_as_long_as_others_of_their_kind() -> None:
    world = World()
    world.learn(1000, 100, times=200)
    world.learn(20)
    assert world.expect(1, 1000).end == pytest.approx(1.0, rel=0.01)
    assert world.expect(1, 20).end == pytest.approx(0.2, abs=0.002), "another kind"


def test_of_requests_that_run_one_is_expected_to_end_sooner_than_all() -> None:
    world = World(running=16)
    for used in range(10, 1000, 20):
        world.learn(1000, used, times=1)
    for _ in range(16):
        world.submit(1, 1000)
    world.run()
    assert 0.3 < world.expect(1, 1000).first < 1.5
    for _ in range(16):
        world.submit(1, 1000)
    assert 6.5 < world.expect(1, 1000).first < 8.5, "12 of them end in 7.5 s, and 4.5 of those that follow"


@pytest.mark.parametrize("how", ["abort", None])
def test_outputs_that_are_cut_short_tell_that_they_may_be_longer_and_not_shorter(how: Any) -> None:
    world = World()
    world.learn(1000, 1000)
    world.learn(1000, 100, 200, end=how)
    assert world.expect(1, 1000).end == pytest.approx(10.0, abs=0.01)
    world.learn(1000, 100, times=200)
    assert world.expect(1, 1000).end == pytest.approx(1.0, rel=0.1)
    world.learn(1000, 900, 200, end=how)
    assert world.expect(1, 1000).end == pytest.approx(9.0, rel=0.1)


def test_tokens_of_drafts_are_expected_in_the_steps_that_they_take() -> None:
    world = World()
    for number in range(1, 201):
        sequence = world.new(1, 100)
        sequence.sampled_in = 25 * number - 24
        world.memory.resolved(25 * number)
        sequence.output_ids += [1] * 97  # four in a step
        sequence.output.finish_reason = "length"
        world.forecast.ended(sequence)
    assert world.expect(1, 100).end == pytest.approx(0.25, rel=0.1)


# -- refusals ----------------------------------------------------------------------------------------


def test_nothing_is_late_before_steps_and_outputs_were_seen() -> None:
    fresh = World(times=StepTime(0.0))
    fresh.learn()
    assert fresh.late(deadline=1e-6, ttft_target=1e-6) is None
    world = World()
    world.learn(times=3)
    assert world.late(deadline=0.05) is None
    world.learn(times=1)
    found = world.late(deadline=0.05)
    assert found is not None
    assert found.limit == "deadline"
    assert (found.seconds, found.late) == pytest.approx((0.101, 0.051))
    assert world.late(deadline=0.2) is None


def test_a_first_token_is_not_promised_while_nobody_knows_when_a_slot_comes_free() -> None:
    world = World(running=1)
    world.submit(1, 1000)
    world.run()
    assert world.late(ttft_target=0.1) is None
    world.learn(1000)
    world.learn(10)
    found = world.late(ttft_target=0.1)
    assert found is not None
    assert found.limit == "ttft_target"
    assert found.late == pytest.approx(9.99 + 0.011 - 0.1)


def test_an_idle_engine_does_not_refuse_for_ever_what_it_once_found_slow() -> None:
    world = World()
    world.learn()
    refused = 0
    while world.late(deadline=0.05):
        refused += 1
    assert 20 < refused < 50
    world.submit(1, 10)
    world.run(10)
    assert world.late(deadline=0.05), "what runs teaches it what is true"


@pytest.mark.parametrize(("took", "least", "most"), [(0.03, 1.8, 2.2), (0.011, 0.79, 0.81)])
def test_it_learns_from_what_it_accepted_how_far_it_is_off(took: float, least: float, most: float) -> None:
    """What is late most of the time is refused until it no longer is; what never is has the least margin."""
    world = World()
    world.learn()
    for _ in range(300):
        sequence = world.new(1, 10, ttft_target=0.0215, arrival=world.times.now, priority=1)
        if world.forecast.late(world.scheduler.queues, sequence, world.times.now):
            break
        sequence.output_ids += [1] * 10
        sequence.output.token_times += [world.times.now + took] * 10
        sequence.output.finish_reason = "length"
        world.forecast.ended(sequence)
    found = world.late(ttft_target=1e-6, priority=1)
    assert found is not None
    assert least < found.seconds / 0.011 < most
    assert world.late(ttft_target=0.012) is None, "another priority has another margin"


# -- against what happens ----------------------------------------------------------------------------


def cost(step: Step) -> float:
    rows = step.generating
    decoding = 0.008 + 4e-4 * rows.num_tokens + 2e-7 * float(rows.starts.sum())
    return decoding + sum(row.length * (2e-4 + 1e-8 * row.start) for row in step.prefilling)


def off(policy: str, seed: int) -> tuple[float, float]:
    """What is expected of one more request, as multiples of what it takes, when nothing more comes: on a
    device that is loaded with some of all kinds."""
    world = World(policy, times=StepTime(0.0), running=8, max_step_tokens=256)
    dice = random.Random(seed)
    for tokens in (20, 60, 120):
        world.learn(tokens)

    def request(deadline: float | None) -> Sequence:
        prompt, tokens, priority = (
            dice.choice([16, 200, 600]),
            dice.choice([20, 60, 120]),
            dice.choice([0, 1]),
        )
        return world.submit(prompt, tokens, deadline=deadline, priority=priority, arrival=world.times.now)

    for _ in range(40):
        request(dice.choice([None, 100.0]))
    while len(world.scheduler.queues.waiting) > 12:
        world.run(took=cost)
    sequence = world.new(200, 60, deadline=90.0, priority=0)
    found = world.forecast.expect(world.scheduler.queues, sequence, world.times.now)
    assert found is not None
    assert found.end is not None
    began, first = world.times.now, None
    world.scheduler.submit(sequence)
    while not sequence.finished:
        world.run(took=cost)
        if first is None and sequence.output_ids:
            first = world.times.now - began
    assert first is not None
    return found.first / first, found.end / (world.times.now - began)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "slack"])
def test_the_forecast_is_about_what_a_request_takes(policy: str) -> None:
    first, end = zip(*(off(policy, seed) for seed in range(8)), strict=True)
    assert sorted(first)[4] == pytest.approx(1.0, abs=0.1)
    assert sum(abs(each - 1) for each in first) / len(first) < 0.1
    # That the engine will be less busy when nothing more comes is not foreseen.
    assert sorted(end)[4] == pytest.approx(1.1, abs=0.15)
