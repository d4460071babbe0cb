"""A step that runs out of memory costs time and nothing else; who cannot do with less ends alone."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import OutOfMemory
from aioinfer.execution.device import StepOutOfMemory
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.llm import LLM
from aioinfer.params import Grammar, SamplingParams
from aioinfer.scheduling.step import Step
from examples.training.tasks import held_out
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_forced_and_late import SCHEMA
from tests.engine.test_launchers import AsynchronousToy
from tests.engine.test_transparency import MODES, toy_requests
from tests.tiers import SECONDS, grid, rest
from tests.toys import ToyDevice, toy_generate


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


def toy(config: EngineConfig, **faults: Any) -> ToyDevice:
    return ToyDevice(num_pages=64, page_size=config.page_size, num_slots=config.num_slots, **faults)


async def _run(engine: Engine, prompt: Any, params: SamplingParams) -> list[int]:
    return (await engine.generate(prompt, params)).token_ids


@pytest.mark.parametrize("when", ["fault", "late_fault"])
@pytest.mark.parametrize(("window", "mode"), MODES)
async def test_toy_ids_are_the_same_whichever_step_runs_out(
    make_engine: MakeEngine, window: int, mode: str, when: str
) -> None:
    """Before it has computed anything, and when all is sampled."""
    requests = toy_requests()
    for at in (1, 2, 5, 13):
        fault = RunsOut(at, at + 60)
        config = EngineConfig(model="toy", page_size=4, max_running_requests=8, overlap_steps=window)
        device = toy(config, **{when: fault})
        async with make_engine(overlap_steps=window, launch_mode=mode, device=device, chunk_size=8) as engine:
            results = await asyncio.gather(*[_run(engine, *request) for request in requests])
            stats = engine.stats()
            await settle(engine)
        assert results == [toy_generate(prompt, each, seed=each.seed or 0) for prompt, each in requests]
        assert stats.out_of_memory_retries >= fault.raised > 0
        assert stats.retractions >= stats.out_of_memory_retries
        assert stats.step_tokens < engine.config.step_tokens


@rest(SECONDS)
@pytest.mark.parametrize("launcher", [ThreadLauncher, InlineLauncher])
@pytest.mark.parametrize("window", grid([2], [0, 1]))
async def test_steps_of_an_asynchronous_device_run_out_where_their_flights_are_read(
    launcher: Any, window: int
) -> None:
    requests = toy_requests()
    config = EngineConfig(model="toy", page_size=4, max_running_requests=8, overlap_steps=window)
    fault = RunsOut(2, 60)
    device = AsynchronousToy(num_slots=config.num_slots, fault=fault)
    async with Engine(config, launcher=lambda _: launcher(device), tokenizer=lambda _: None) as engine:
        results = await asyncio.gather(*[_run(engine, *request) for request in requests])
        await settle(engine)
    assert results == [toy_generate(prompt, each, seed=each.seed or 0) for prompt, each in requests]
    assert fault.raised > 0


@pytest.mark.parametrize("window", [0, 1, 2])
async def test_steps_that_are_too_large_for_the_memory_become_smaller(
    make_engine: MakeEngine, window: int
) -> None:
    requests = toy_requests()[:8]
    fault = RunsOut(always=lambda step: step.num_tokens > 60)
    async with make_engine(overlap_steps=window, fault=fault) as engine:
        results = await asyncio.gather(*[_run(engine, *request) for request in requests])
    assert results == [toy_generate(prompt, each, seed=each.seed or 0) for prompt, each in requests]
    assert fault.raised > 0


@pytest.mark.parametrize(("window", "mode"), MODES)
async def test_a_request_that_is_too_much_ends_alone_with_one_clean_error(
    make_engine: MakeEngine, window: int, mode: str
) -> None:
    def too_much(step: Step) -> bool:
        return any(len(row.request.prompt_ids) == 99 and row.length > 5 for row in step.rows)

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


async def test_what_was_delivered_stays_and_streams_go_on(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    fault = RunsOut(*range(4, 60, 16))
    async with make_engine(overlap_steps=2, fault=fault) as engine:
        ids: list[int] = []
        async for chunk in engine.generate([1, 2, 3], params):
            ids += chunk.token_ids
        events = [event[0] for event in engine.timeline.loop.events]
    assert ids == toy_generate([1, 2, 3], params)
    assert events.count("run out") == fault.raised > 0


async def test_deadlines_run_on_from_the_first_step(make_engine: MakeEngine) -> None:
    """Who starts over has been admitted before, and is not told of it again."""
    admitted: list[int] = []
    async with make_engine(fault=RunsOut(1, 12)) as engine:
        engine._started().admitted = lambda request: admitted.append(request.key)  # type: ignore[method-assign]
        await _run(engine, [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(admitted) == 1


# -- grammars, penalties and logprobs on a real model --------------------------------------------------------


class Shortage(TorchDevice):
    """The bundled model; one step runs out of memory: in its forward, when it has sampled, or when a grammar
    forces tokens."""

    def __init__(self, config: EngineConfig, place: str, at: int) -> None:
        super().__init__(config)
        self._at = {place: at}

    def open(self, progress: Any = None) -> Any:
        info = super().open(progress)
        runner = self._backend._runner  # type: ignore[union-attr]
        decoding, at = runner.decoding, self._at
        model, sampler, grammars = runner.model, decoding.sampler, decoding.grammars
        forwards, samples, forced = itertools.count(1), itertools.count(1), itertools.count(1)

        class Model:
            spec = model.spec

            def forward(self, batch: Any, attention: Any) -> Any:
                logits = model.forward(batch, attention)
                if next(forwards) == at.get("forward"):
                    torch.empty(1 << 50)
                return logits

        class Sampler:
            reset = sampler.reset
            logits_processors = sampler.logits_processors
            logprobs = sampler.logprobs

            def sample(self, *arguments: Any) -> Any:
                return self._sampled(sampler.sample(*arguments))

            def verify(self, *arguments: Any) -> Any:
                return self._sampled(sampler.verify(*arguments))

            def _sampled(self, found: Any) -> Any:
                if next(samples) == at.get("sampler"):
                    raise StepOutOfMemory("in the sampler")
                return found

        class GrammarWorker:
            advance = grammars.advance
            look_ahead = grammars.look_ahead

            def collect(self, *arguments: Any) -> Any:
                found = grammars.collect(*arguments)
                if found.forced and next(forced) == at.get("forced"):
                    raise StepOutOfMemory("tokens that are forced are lost")
                return found

        runner.model, decoding.sampler, decoding.grammars = Model(), Sampler(), GrammarWorker()
        return info


def requests() -> list[tuple[Any, SamplingParams]]:
    """Greedy and seeded ones, with penalties, with grammars that force tokens and that do not, bad words."""
    story = held_out("story", 1)[0].messages
    found: list[tuple[Any, SamplingParams]] = [
        (item.messages, SamplingParams(temperature=0, max_tokens=20)) for item in held_out("json", 1)
    ]
    for seed in range(2):
        found += [
            (story, SamplingParams(temperature=1.2, seed=seed, max_tokens=20, logprobs=2, prompt_logprobs=1)),
            (story, SamplingParams(seed=seed, max_tokens=20, frequency_penalty=1.0, repetition_penalty=1.2)),
            (story, SamplingParams(seed=seed, max_tokens=30, grammar=SCHEMA)),
            (story, SamplingParams(seed=seed, max_tokens=20, grammar=Grammar("regex", "[a-z ]{40}"))),
            (story, SamplingParams(temperature=0, max_tokens=20, bad_words=("the", "and"))),
        ]
    return found


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    config = EngineConfig(dtype="float32", overlap_steps=0, max_running_requests=1, threads=1)
    with LLM(config) as llm:
        return [llm.generate([prompt], params)[0] for prompt, params in requests()]


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
    window: int, mode: Any, place: str, at: int, alone: list[Any]
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
        results = await asyncio.gather(*[engine.generate(*request) for request in requests()])
        stats = engine.stats()
    assert stats.out_of_memory_retries > 0
    for result, wanted in zip(results, alone, strict=True):
        assert result.token_ids == wanted.token_ids
        assert result.finish_reason == wanted.finish_reason
        for mine, theirs in (
            (result.logprobs, wanted.logprobs),
            (result.prompt_logprobs, wanted.prompt_logprobs),
        ):
            assert (mine is None) == (theirs is None)
            assert len(mine or ()) == len(theirs or ())
            for one, other in zip((mine or ())[1:], (theirs or ())[1:], strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    for result in (results[3], results[8]):
        assert result.finish_reason == "length" or json.loads(result.text)
