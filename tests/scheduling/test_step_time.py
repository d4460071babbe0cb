"""Prefill beside running streams takes no longer than ``itl_target``, by what steps took before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.scheduling.step import Step
from aioinfer.scheduling.step_time import StepTime
from tests.scheduling.desk import Desk

TARGET = 0.2
Cost = Callable[[Step], float]


def cost(step: Step, *, base: float = 0.02, token: float = 0.0017, pair: float = 4e-7) -> float:
    """Seconds of a step on a processor: its costs are not in the proportions that are expected at first."""
    rows = step.generating
    decoding = base + 0.0016 * rows.num_tokens + 5e-6 * float(rows.starts.sum())
    tokens = sum(row.length for row in step.prefilling)
    return decoding + token * tokens + pair * sum(row.length * row.start for row in step.prefilling)


def desk_of(**limits: Any) -> Desk:
    options: dict[str, Any] = {"max_step_tokens": 2048, "chunk_size": 512, "itl_target": TARGET}
    options |= {"pages": 2000, "page_size": 16, "running": 40, "prefix_cache": False, "admission": "pack"}
    return Desk(**{**options, **limits})


def step_of(desk: Desk, took: Cost = cost) -> tuple[Step, float]:
    """One step from plan to resolve, and its seconds."""
    step = desk.launch()
    seconds = took(step)
    desk.scheduler.times.observe(step, seconds)
    desk.bring(step)
    return step, seconds


def stream_on(desk: Desk, streams: int, prompt: int = 32, took: Cost = cost) -> None:
    for _ in range(streams):
        desk.submit(prompt, 4000)
    while len(desk.scheduler.queues.batch) < streams:
        step_of(desk, took)
    for _ in range(5):
        step_of(desk, took)


def prefill(step: Step) -> list[int]:
    return [row.length for row in step.prefilling]


@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("prompts", [(900,), (900,) * 4, (900,) * 16, (8000,), (5, 900, 30, 8000)])
def test_streams_wait_no_longer_than_the_target_and_prompts_use_it(
    streams: int, prompts: tuple[int, ...]
) -> None:
    desk = desk_of()
    stream_on(desk, streams)
    sequences = [desk.submit(length, 1) for length in prompts]
    took: list[float] = []
    while not all(each.finished for each in sequences):
        step, seconds = step_of(desk)
        if step.prefilling:
            took.append(seconds)
    assert max(took) < 1.2 * TARGET
    assert max(took[len(took) // 2 :]) < 1.1 * TARGET
    # The last one of a prompt has what is left of it.
    full = sorted(took)[len([each for each in prompts if each > 100]) :]
    assert min(full, default=TARGET) > 0.7 * TARGET
    times = desk.scheduler.times
    assert 0 < times.cut_steps <= len(took)
    assert times.cut_seconds > 0.02 * times.cut_steps


def test_without_streams_prefill_is_as_large_as_without_a_target() -> None:
    steps = []
    for target in (TARGET, 0.0):
        desk = desk_of(itl_target=target)
        for length in (900, 900, 900, 5000):
            desk.submit(length, 1)
        steps.append([prefill(step_of(desk)[0]) for _ in range(3)])
        assert desk.scheduler.times.cut_steps == 0
    assert steps[0] == steps[1]
    assert sum(steps[0][0]) == 2048


def test_the_limits_in_tokens_hold_as_well() -> None:
    desk = desk_of(chunk_size=48, max_prefill_tokens=64)
    stream_on(desk, 1)
    for _ in range(4):
        desk.submit(900, 1)
    for _ in range(10):
        step, _ = step_of(desk)
        assert max(prefill(step)) <= 48
        assert 48 < sum(prefill(step)) <= 64
    assert desk.scheduler.times.cut_steps == 0


def test_one_prompt_goes_on_at_a_time_and_its_rows_fill_up_those_of_kernels() -> None:
    desk = desk_of()
    stream_on(desk, 3)
    first, *others = [desk.submit(900, 1) for _ in range(4)]
    while not first.finished:
        step, _ = step_of(desk)
        if first.cursor.computed < 900:
            assert [row.sequence for row in step.prefilling] == [first]
            assert step.num_tokens % 8 == 0
    assert not any(each.finished for each in others)


@pytest.mark.parametrize("slow", [0.3, 5.0])
def test_prompts_go_on_where_a_step_without_them_takes_longer_than_the_target(slow: float) -> None:
    def took(step: Step) -> float:
        return cost(step, base=slow)

    desk = desk_of()
    stream_on(desk, 2, took=took)
    sequence = desk.submit(900, 1)
    steps = 0
    while not sequence.finished:
        _, seconds = step_of(desk, took)
        assert seconds < 1.8 * slow
        steps += 1
    assert steps < 40


def test_a_prompt_has_eight_tokens_of_each_step_where_even_one_takes_too_long() -> None:
    def took(step: Step) -> float:
        return cost(step, token=3.0)

    desk = desk_of()
    stream_on(desk, 1, prompt=2, took=took)
    sequence = desk.submit(20, 1)
    for length, computed in ((8, 8), (8, 16), (4, 20)):
        assert prefill(step_of(desk, took)[0]) == [length]
        assert sequence.cursor.computed == computed


def test_before_anything_is_measured_little_is_computed_and_something() -> None:
    desk = desk_of()
    desk.submit(32, 100)
    desk.plan()
    desk.submit(900, 1)
    step = desk.launch()
    assert step.generating
    assert 0 < sum(prefill(step)) < 50


def test_a_disturbed_step_is_forgotten_soon() -> None:
    desk = desk_of()
    stream_on(desk, 1)
    desk.submit(8000, 1)
    usual = [step_of(desk) for _ in range(10)][-1]
    step_of(desk, lambda step: 100 * cost(step))
    assert sum(prefill(step_of(desk)[0])) > 0.3 * sum(prefill(usual[0]))
    again = [step_of(desk) for _ in range(10)][-1]
    assert again[1] > 0.8 * TARGET


def test_a_machine_that_becomes_slower_is_followed() -> None:
    desk = desk_of()
    stream_on(desk, 4)
    desk.submit(8000, 1)
    for _ in range(5):
        step_of(desk)

    def slower(step: Step) -> float:
        return 2.5 * cost(step)

    took = [step_of(desk, slower)[1] for _ in range(12)]
    assert took[0] > 2 * TARGET
    assert max(took[6:]) < 1.1 * TARGET


@pytest.mark.parametrize("settings", [{"mixed": False}, {"step_priority": "prefill"}])
def test_other_orders_of_rows_are_bounded_too(settings: dict[str, Any]) -> None:
    desk = desk_of(**settings)
    stream_on(desk, 8)
    desk.submit(3000, 1)
    took = [step_of(desk)[1] for _ in range(20)]
    assert max(took[5:]) < 1.2 * TARGET


def test_the_same_times_bring_the_same_steps() -> None:
    def run() -> list[tuple[int, list[int]]]:
        dice = random.Random(3)
        desk = desk_of()
        stream_on(desk, 2)
        for length in (900, 20, 3000):
            desk.submit(length, 5)
        found = [step_of(desk, lambda step: cost(step) * dice.uniform(0.8, 1.5))[0] for _ in range(40)]
        return [(step.num_tokens, prefill(step)) for step in found]

    assert run() == run()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_times_that_are_none_are_ignored(seconds: float) -> None:
    desk = desk_of()
    stream_on(desk, 1)
    times = desk.scheduler.times
    before = times.prefill(100, 100)
    times.observe(desk.launch(), seconds)
    assert times.prefill(100, 100) == before


def test_costs_stay_positive_whatever_steps_take() -> None:
    dice = random.Random(7)
    desk = desk_of()
    stream_on(desk, 3)
    for _ in range(30):
        desk.submit(dice.randint(1, 3000), dice.randint(1, 30))
    for _ in range(300):
        step_of(desk, lambda _: 10 ** dice.uniform(-6, 2))
        times = desk.scheduler.times
        assert all(0 < each < float("inf") for each in times._factors)
        left = times.left(0.0)
        assert times.prefill(500, times.fitting(500, left)) <= left * 1.001


def test_a_chunk_that_fits_takes_the_time_that_there_is() -> None:
    times = StepTime(TARGET)
    for start in (0, 100, 10_000):
        length = times.fitting(start, 3.0)
        assert times.prefill(start, length) <= 3.0 < times.prefill(start, length + 1)
    assert times.fitting(0, 0.0) == times.fitting(0, -1.0) == 0
