"""Targets of a request: what is accepted keeps them, what is refused would not have, and without them nothing
changes. In virtual time."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from typing import Any

import pytest

from aioinfer import InvalidRequest, Rejected, SamplingParams
from aioinfer.parallel import Dispatcher
from aioinfer.scheduling.forecast import Forecast
from aioinfer.scheduling.step import Step
from bench import promises
from bench.report import percentiles
from tests.engine.conftest import MakeEngine
from tests.parallel.toys import ENDLESS, PARAMS, STEP, Toy, attempt_of, end, prompt, toys, virtual
from tests.tiers import SECONDS, rest

SECOND = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
FEW = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)


def toy(**settings: Any) -> Toy:
    return Toy(**{"max_running_requests": 2, "overlap_steps": 0, **settings})


async def learned(engine: Toy) -> None:
    """It has seen what steps take, and how long outputs are."""
    for params in (SECOND, FEW):
        await asyncio.gather(*(engine.generate(prompt(seed), params) for seed in range(5)))


@pytest.mark.parametrize("name", ["ttft_target", "itl_target"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "5", True])
async def test_targets_are_positive_numbers_of_seconds(
    make_engine: MakeEngine, name: str, value: Any
) -> None:
    async with make_engine() as engine:
        options: dict[str, Any] = {name: value}
        with pytest.raises(InvalidRequest, match=f"{name}: must be a positive number of seconds"):
            engine.generate([1, 2], **options)


# -- ttft_target -------------------------------------------------------------------------------------


@virtual
async def test_what_would_start_late_is_refused_with_the_prediction_and_accepted_when_it_said_so() -> None:
    async with toy() as engine:
        await learned(engine)
        running = [engine.generate(prompt(seed), SECOND) for seed in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(
            Rejected, match=r"first token would come in 0\.\d+ s, 0\.\d+ s after its target of 0\.5 s"
        ) as refused:
            engine.generate(prompt(9), FEW, ttft_target=0.5)
        assert refused.value.code == "ttft_target"
        assert refused.value.retry_after == pytest.approx(0.42, abs=0.05)
        await asyncio.sleep(refused.value.retry_after + 0.02)
        result = await engine.generate(prompt(9), FEW, ttft_target=0.5)
        assert result.metrics is not None
        assert result.metrics.ttft is not None
        assert result.metrics.ttft < 0.5
        assert result.metrics.predicted_ttft == pytest.approx(result.metrics.ttft, rel=0.1)
        assert (await engine.generate(prompt(9), FEW)).metrics.predicted_ttft is None  # type: ignore[union-attr]
        await asyncio.gather(*running)


@virtual
async def test_an_engine_has_a_target_for_all_requests() -> None:
    async with toy(ttft_target=0.5) as engine:
        await learned(engine)
        running = [engine.generate(prompt(seed), SECOND) for seed in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(Rejected, match=r"target of 0\.5 s"):
            engine.generate(prompt(9), FEW)
        assert len((await engine.generate(prompt(9), FEW, ttft_target=5.0)).token_ids) == 3
        await asyncio.gather(*running)


@virtual
async def test_requests_of_lower_priority_do_not_count() -> None:
    async with toy(policy="priority") as engine:
        await learned(engine)
        running = [engine.generate(prompt(seed), SECOND) for seed in range(4)]
        await asyncio.sleep(0.1)
        with pytest.raises(Rejected):
            engine.generate(prompt(9), FEW, ttft_target=1.0)
        result = await engine.generate(prompt(9), FEW, ttft_target=1.0, priority=1)
        assert result.metrics is not None
        assert result.metrics.ttft == pytest.approx(result.metrics.predicted_ttft, rel=0.1)
        await asyncio.gather(*running)


@virtual
async def test_what_has_begun_is_not_refused() -> None:
    async with toy() as engine:
        await learned(engine)
        stream = engine.generate(prompt(9), SECOND, ttft_target=0.1)
        await anext(stream)
        checkpoint = stream.checkpoint()
        running = [engine.generate(prompt(seed), SECOND) for seed in range(4)]
        stream.rewind(0)
        again = engine.restore(checkpoint, ttft_target=0.1)
        for each in (stream, again):
            assert len((await each).token_ids) == 100
        await asyncio.gather(*running)


@virtual
async def test_a_replica_gets_what_is_left_of_a_target() -> None:
    engines = toys(2, max_running_requests=1)
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        running = [dispatcher.generate(prompt(number), ENDLESS) for number in range(2)]
        waits = dispatcher.generate(prompt(2), PARAMS, ttft_target=5.0)
        await asyncio.sleep(1.0)
        running[0].close()
        while attempt_of(waits) is None:
            await asyncio.sleep(STEP / 10)
        requests = [each.output.request for each in engines[0]._serving().open]
        (left,) = [each.ttft_target for each in requests if each.ttft_target is not None]
        assert left == pytest.approx(4.0, abs=3 * STEP)
        await end(running)


# -- itl_target --------------------------------------------------------------------------------------


async def gaps(engine: Toy, **options: Any) -> float:
    """The longest gap of a stream beside which long prompts come."""
    async with engine:
        await learned(engine)
        stream = engine.generate(prompt(0), SamplingParams(max_tokens=200, ignore_eos=True), **options)
        await anext(stream)
        others = [engine.generate(prompt(seed, 2000), FEW) for seed in range(3)]
        result = await stream
        await asyncio.gather(*others)
    assert result.metrics is not None
    return max(after - before for before, after in itertools.pairwise(result.metrics.token_times))


@virtual
async def test_steps_keep_the_smallest_target_of_those_that_generate() -> None:
    def seconds(step: Step) -> float:
        return 0.01 + 0.001 * step.num_tokens

    def engine(target: float) -> Toy:
        return toy(itl_target=target, max_running_requests=4, seconds=seconds)

    assert await gaps(engine(0.0)) > 0.5
    for own, target in ((0.05, 0.0), (0.05, 0.2), (0.2, 0.05), (None, 0.05)):
        assert await gaps(engine(target), itl_target=own) == pytest.approx(0.05, rel=0.2)


@virtual
async def test_the_target_of_a_request_that_has_ended_binds_nobody() -> None:
    async with toy(max_running_requests=4, itl_target=0.2) as engine:
        await engine.generate(prompt(0), FEW, itl_target=1e-3)
        await engine.generate(prompt(0), FEW)
        assert engine._runtime is not None
        scheduler = engine._runtime.core.scheduler
        assert (scheduler.times.target, scheduler.queues.timely) == (0.2, {})


# -- without targets ---------------------------------------------------------------------------------


def course(**settings: Any) -> list[Any]:
    """Steps and outputs of a load without targets."""
    steps: list[Any] = []

    def seconds(step: Step) -> float:
        steps.append([(row.sequence.key, row.start, row.length) for row in step.rows])
        return STEP

    @virtual
    async def run() -> None:
        async with toy(seconds=seconds, overlap_steps=1, itl_target=0.05, **settings) as engine:
            streams = [engine.generate(prompt(seed, 40 + seed), PARAMS) for seed in range(12)]
            steps.append([result.token_ids for result in await asyncio.gather(*streams)])

    run()
    return steps


def test_without_targets_nothing_is_predicted_and_steps_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = course(ttft_target=1000.0)

    def never(*_: Any) -> None:
        raise AssertionError("nobody has asked")

    monkeypatch.setattr(Forecast, "late", never)
    assert course() == accepted


# -- the promises ------------------------------------------------------------------------------------


def figures(*arguments: str) -> tuple[argparse.Namespace, list[promises.Ask], float]:
    parser = argparse.ArgumentParser()
    promises.add_arguments(parser)
    options = parser.parse_args(arguments)
    asks = promises.load_of(options)
    return options, asks, promises.simulate(options, asks, [], None)[1]


@rest(SECONDS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_is_accepted_starts_in_time_and_what_is_refused_would_not(policy: str) -> None:
    options, asks, whole = figures("--requests", "400", "--sample", "20", "--policy", policy)
    for load in (0.6, 1.3):
        row = promises.promises(options, asks, load, whole)
        assert row["met"] >= 0.95
        # With priorities nobody knows who comes later and overtakes a request.
        assert policy == "priority" or row["refused_met"] is None or row["refused_met"] <= 0.1
    assert row["took_p50"] == pytest.approx(1.0, abs=0.1)


@rest(SECONDS)
def test_gaps_keep_their_target_and_prompts_are_as_fast_as_with_the_best_chunk() -> None:
    target = 0.05
    found = promises.gaps(target, 512, seed=1, prompts=30)
    p99 = percentiles(found.seconds)["p99"]
    assert p99 <= 1.2 * target
    fixed = [promises.gaps(0.0, chunk, seed=1, prompts=30) for chunk in (64, 128, 256)]
    assert found.rate >= max(each.rate for each in fixed if percentiles(each.seconds)["p99"] <= 1.2 * target)
