"""A step that raises costs time and nothing else, but for the request that it raises for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.scheduling.step import Row, Step
from tests.engine.asking import bundled_requests
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_transparency import MODES, toy_requests
from tests.tiers import SECONDS, grid, rest
from tests.toys import ToyDevice, toy_generate
from tests.toys.blocks import ScriptedDevice, scripted_generate


class Broken(Exception):
    """What a forward raises."""


class Raises:
    """Raises for steps with a row that is ``wrong``; keeps how many rows these had."""

    def __init__(self, wrong: Callable[[Row], bool] = lambda row: True) -> None:
        self.wrong = wrong
        self.raised: list[int] = []

    def __call__(self, step: Step) -> None:
        if any(self.wrong(row) for row in step.rows):
            self.raised.append(step.num_rows)
            raise Broken("index 3 is out of bounds", step.id)


async def run(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
    """What comes of requests: ids, or what they raise."""
    streams = [engine.generate(prompt, params) for prompt, params in requests]
    found = await asyncio.gather(*streams, return_exceptions=True)
    await settle(engine)
    return [each.token_ids if isinstance(each, Result) else each for each in found]


def check(found: list[Any], wanted: list[list[int]], guilty: set[int]) -> None:
    for at, (got, ids) in enumerate(zip(found, wanted, strict=True)):
        if at in guilty:
            assert isinstance(got, errors.StepFailed)
            assert isinstance(got.__cause__, Broken)
        else:
            assert got == ids


def toy_answers() -> list[list[int]]:
    return [toy_generate(prompt, params, seed=params.seed or 0) for prompt, params in toy_requests()]


@pytest.mark.parametrize(("window", "mode"), MODES)
@pytest.mark.parametrize("guilty", [{3}, {0, 4, 5}, {11}], ids=str)
async def test_only_the_requests_that_a_step_raises_for_end(
    make_engine: MakeEngine, window: int, mode: str, guilty: set[int]
) -> None:
    """From some length on, as where attention fails behind its first block."""
    requests = toy_requests()
    long = {at: len(requests[at][0]) + 1 for at in guilty}
    fault = Raises(lambda row: row.sequence.key - 1 in long and row.kv_length > long[row.sequence.key - 1])
    for changes in ({}, {"chunk_size": 2}, {"num_pages": 14}, {"mixed": False}, {"prefix_cache": False}):
        fault.raised.clear()
        async with make_engine(overlap_steps=window, launch_mode=mode, fault=fault, **changes) as engine:
            found = await run(engine, requests)
            assert engine.ready
        ended = {at for at in guilty if len(toy_answers()[at]) > 2}
        check(found, toy_answers(), ended)
        # Once with others, and perhaps in those that are in flight then; once alone.
        assert len(fault.raised) <= (window + 2) * len(ended)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("snapshots", [0, 8])
async def test_so_do_the_others_of_a_model_with_recurrent_state(
    make_engine: MakeEngine, window: int, snapshots: int
) -> None:
    fault = Raises(lambda row: row.sequence.key == 5 and row.kv_length > len(row.sequence.prompt_ids) + 1)
    config = EngineConfig(model="toy", overlap_steps=window, max_running_requests=8)
    device = ToyDevice(num_pages=64, num_slots=config.num_slots, fault=fault, snapshots=snapshots)
    async with make_engine(device=device, overlap_steps=window) as engine:
        check(await run(engine, toy_requests()), toy_answers(), {4})


@pytest.mark.parametrize("window", [0, 1, 2])
async def test_steps_that_raise_for_nobody_in_particular_end_nobody(
    make_engine: MakeEngine, window: int
) -> None:
    def fault(step: Step) -> None:
        if step.num_rows > 1:
            raise Broken

    async with make_engine(overlap_steps=window, fault=fault) as engine:
        check(await run(engine, toy_requests()), toy_answers(), set())


@pytest.mark.parametrize("window", [0, 1, 2])
async def test_steps_that_always_raise_end_everybody_and_not_the_engine(
    make_engine: MakeEngine, window: int
) -> None:
    fault = Raises()
    async with make_engine(overlap_steps=window, fault=fault) as engine:
        check(await run(engine, toy_requests()), toy_answers(), set(range(12)))
        assert engine.ready
        fault.wrong = lambda row: False
        check(await run(engine, toy_requests()), toy_answers(), set())


@pytest.mark.parametrize("what", ["abort", "arrival", "pause", "flush"])
async def test_what_happens_while_they_go_on_alone_harms_nobody(make_engine: MakeEngine, what: str) -> None:
    gate = Gate()
    requests = toy_requests()[:6]

    def fault(step: Step) -> None:
        if step.num_rows > 1 and any(row.kv_length > 9 for row in step.rows) and not raised:
            raised.append(step.id)
            raise Broken
        if raised:
            gate(step)

    raised: list[int] = []
    async with make_engine(fault=fault, chunk_size=3) as engine:
        streams = [engine.generate(prompt, params) for prompt, params in requests]
        await asyncio.to_thread(gate.arrived.acquire)
        gone = set()
        if what == "abort":
            for at in (0, 1, 2):
                await streams[at].aclose()
                gone.add(at)
        elif what == "arrival":
            streams.append(engine.generate(*toy_requests()[6]))
        elif what == "flush":
            engine._core.scheduler.memory.flush()
        pausing = asyncio.ensure_future(engine.pause() if what == "pause" else asyncio.sleep(0))
        await asyncio.sleep(0)
        gate.release()
        await pausing
        engine.resume()
        found: list[Any] = await asyncio.gather(*streams, return_exceptions=True)
        await settle(engine)
    assert raised
    for at, got in enumerate(found):
        assert at in gone or got.token_ids == toy_answers()[at]


@pytest.mark.parametrize("rounds", [1, 50])
@pytest.mark.parametrize("window", [0, 1])
async def test_blocks_go_on_from_the_rounds_that_were_read(
    make_engine: MakeEngine, rounds: int, window: int
) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, diffusion=DiffusionParams(threshold=0.9)
    )
    fault = Raises(lambda row: row.sequence.key == 2 and row.kv_length > 8)
    device = ScriptedDevice(mean_steps=6.0, variation=0.3, fault=fault)
    settings = {"page_size": 8, "max_rounds": rounds, "overlap_steps": window}
    async with make_engine(device=device, tokenizer=None, **settings) as engine:
        found = await run(engine, [([number], params) for number in range(1, 6)])
    check(found, [scripted_generate(device.script, [number], params) for number in range(1, 6)], {1})


class BreakingDevice(TorchDevice):
    """The bundled model; a forward with a row of a certain length raises."""

    def open(self, progress: Any = None) -> Any:
        info = super().open(progress)
        model = self._backend._runner.model  # type: ignore[union-attr]
        forward = model.forward

        def breaking(batch: Any, attention: Any) -> Any:
            if any(length > 75 for length in batch.kv_lens):
                raise Broken("index 3 is out of bounds")
            return forward(batch, attention)

        model.forward = breaking  # type: ignore[method-assign]
        return info


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
async def test_of_a_model_the_others_have_their_tokens_too(window: int, alone: list[Result]) -> None:
    """With grammars, drafts and forced tokens."""
    config = EngineConfig(dtype="float32", threads=1, overlap_steps=window)
    requests = bundled_requests()
    async with Engine(config, launcher=lambda _: ThreadLauncher(BreakingDevice(config))) as engine:
        found = await run(engine, requests)
    lengths = [each.usage.prompt_tokens + each.usage.completion_tokens for each in alone]
    guilty = {at for at, length in enumerate(lengths) if length > 76}
    assert 0 < len(guilty) < len(requests)
    check(found, [each.token_ids for each in alone], guilty)
