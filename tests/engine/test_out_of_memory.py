"""A step that runs out of memory costs time and nothing else; who cannot do with less ends alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import OutOfMemory
from aioinfer.execution.device import StepOutOfMemory
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from tests.engine.asking import bundled_requests
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_launchers import AsynchronousToy
from tests.engine.test_transparency import MODES, toy_requests
from tests.tiers import SECONDS, grid, rest
from tests.toys import toy_generate


class RunsOut:
    """Raises at the steps with these ids, and whenever ``always`` says so."""

    def __init__(self, *steps: int, always: Any = lambda step: False) -> None:
        self.steps = set(steps)
        self.always = always
        self.raised = 0

    def __call__(self, step: Step) -> None:
        if step.id in self.steps or self.always(step):
            self.raised += 1
            raise StepOutOfMemory("there is no memory")


async def _run(engine: Engine, prompt: Any, params: SamplingParams) -> list[int]:
    return (await engine.generate(prompt, params)).token_ids


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
@pytest.mark.parametrize("window", grid([2], [0, 1]))
async def test_steps_of_an_asynchronous_device_run_out_where_their_flights_are_read(
    make_engine: MakeEngine, mode: str, window: int
) -> None:
    requests, fault = toy_requests(), RunsOut(2, 60)
    device = AsynchronousToy(fault=fault)
    async with make_engine(device=device, launch_mode=mode, overlap_steps=window) as engine:
        results = await asyncio.gather(*[_run(engine, *request) for request in requests])
        await settle(engine)
    assert results == [toy_generate(prompt, each, seed=each.seed or 0) for prompt, each in requests]
    assert fault.raised > 0


@pytest.mark.parametrize(("window", "mode"), MODES)
async def test_a_request_that_is_too_much_ends_alone_with_one_clean_error(
    make_engine: MakeEngine, window: int, mode: str
) -> None:
    def too_much(step: Step) -> bool:
        return any(len(row.sequence.prompt_ids) == 99 and row.length > 5 for row in step.rows)

    requests = toy_requests()[:6]
    fault = RunsOut(always=too_much)
    async with make_engine(
        overlap_steps=window, launch_mode=mode, fault=fault, max_running_requests=8
    ) as engine:
        others = [asyncio.ensure_future(_run(engine, *request)) for request in requests]
        stream = engine.generate([1] * 99, SamplingParams(max_tokens=5))
        with pytest.raises(OutOfMemory, match="there is no memory") as caught:
            await stream
        with pytest.raises(OutOfMemory) as again:
            await anext(stream)
        assert again.value is caught.value
        results = await asyncio.gather(*others)
        assert engine.ready
        assert await _run(engine, *requests[0]) == results[0]
        await settle(engine)
    assert isinstance(caught.value.__cause__, StepOutOfMemory)
    assert results == [toy_generate(prompt, each, seed=each.seed or 0) for prompt, each in requests]


async def test_memory_that_never_suffices_ends_everybody_and_not_the_engine(make_engine: MakeEngine) -> None:
    fault = RunsOut(always=lambda step: True)
    async with make_engine(overlap_steps=2, fault=fault) as engine:
        requests = toy_requests()
        tasks = [asyncio.ensure_future(_run(engine, *request)) for request in requests]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, OutOfMemory) for result in results)
        assert len({id(result) for result in results}) == len(results), "each has an exception of its own"
        fault.always = lambda step: False
        prompt, params = requests[0]
        assert await _run(engine, prompt, params) == toy_generate(prompt, params, seed=params.seed or 0)
        await settle(engine)


async def test_deadlines_run_on_from_the_first_step(make_engine: MakeEngine) -> None:
    """Who starts over has been admitted before, and is not told of it again."""
    admitted: list[int] = []
    fault = RunsOut(1, 12)
    async with make_engine(fault=fault) as engine:
        engine._started().admitted = lambda request: admitted.append(request.key)  # type: ignore[method-assign]
        await _run(engine, [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        events = [event[0] for event in engine.timeline.loop.events]
    assert len(admitted) == 1
    assert events.count("run out") == fault.raised > 0


# -- grammars, penalties and logprobs on a real model --------------------------------------------------------


class Shortage(TorchDevice):
    """The bundled model; one step runs out of memory: in its forward, when it has sampled, or when a grammar
    forces tokens."""

    def __init__(self, config: EngineConfig, place: str, at: int) -> None:
        super().__init__(config)
        self._place, self._left = place, at

    def open(self, progress: Any = None) -> Any:
        info = super().open(progress)
        runner: Any = self._backend._runner  # type: ignore[union-attr]
        decoding = runner.decoding
        runner.model = self._short(runner.model, "forward", "forward")
        decoding.sampler = self._short(decoding.sampler, "sampler", "sample", "verify")
        decoding.grammars = self._short(decoding.grammars, "forced", "collect")
        return info

    def _short(self, part: Any, place: str, *methods: str) -> Any:
        """The part, whose methods run out when they have done their work."""

        def after(method: Any) -> Any:
            def call(*arguments: Any) -> Any:
                found = method(*arguments)
                if place == self._place and (place != "forced" or found.forced):
                    self._left -= 1
                    if self._left == 0:
                        torch.empty(1 << 50)
                return found

            return call

        class Short:
            def __getattr__(self, name: str) -> Any:
                found = getattr(part, name)
                return after(found) if name in methods else found

        return Short()


@rest(SECONDS)
@pytest.mark.parametrize(
    ("window", "mode", "place", "at"),
    [
        (0, "thread", "forward", 12),
        (0, "inline", "sampler", 4),
        (1, "inline", "forward", 20),
        (1, "thread", "sampler", 1),
        (2, "thread", "forward", 2),
        (2, "thread", "sampler", 9),
        (2, "inline", "forward", 16),
        # In how many steps tokens are forced depends on when their masks are there: in one at least.
        (1, "thread", "forced", 1),
        (2, "inline", "forced", 1),
    ],
)
async def test_grammars_penalties_and_logprobs_start_over_with_their_requests(
    window: int, mode: Any, place: str, at: int, alone: list[Result]
) -> None:
    config: Any = EngineConfig(
        dtype="float32",
        threads=1,
        overlap_steps=window,
        launch_mode=mode,
        prefix_cache=at % 2 == 0,
        chunk_size=40,
        # Without drafts, more tokens are forced.
        speculation="off" if place == "forced" else "lookup",
        adaptive_drafts=False,
    )
    device = Shortage(config, place, at)
    launcher = ThreadLauncher if mode == "thread" else InlineLauncher
    async with Engine(config, launcher=lambda _: launcher(device)) as engine:
        results = await asyncio.gather(*[engine.generate(*request) for request in bundled_requests()])
        stats = engine.stats()
    assert stats.out_of_memory_retries > 0
    for result, wanted in zip(results, alone, strict=True):
        assert (result.token_ids, result.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        for mine, theirs in (
            (result.logprobs, wanted.logprobs),
            (result.prompt_logprobs, wanted.prompt_logprobs),
        ):
            assert (mine is None) == (theirs is None)
            assert len(mine or ()) == len(theirs or ())
            for one, other in zip((mine or ())[1:], (theirs or ())[1:], strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
