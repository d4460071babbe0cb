"""Other weights for a running engine: what becomes of requests, versions, caches and memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer import Chunk, EngineConfig, Result, SamplingParams, StreamCheckpoint, errors
from aioinfer.engine import EngineState
from aioinfer.llm import LLM
from aioinfer.loop.updating import UpdateMode
from aioinfer.scheduling.sequence import Sequence
from aioinfer.stream import Stream
from tests.engine.conftest import MakeEngine
from tests.engine.making import make_llm
from tests.engine.simulation import settle
from tests.model.checkpoints import FAMILIES, make_model
from tests.toys import ToyDevice, toy_generate

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = [1, 2, 3]


def weights(version: int) -> dict[str, int]:
    """Those of a toy, which writes another text with each."""
    return {"weights": version}


async def chunks_of(stream: Stream) -> list[Chunk]:
    return [chunk async for chunk in stream]


def check_chunks(chunks: list[Chunk], prompt: list[int], params: SamplingParams) -> None:
    """Each version's tokens are what its weights write behind those before."""
    ids: list[int] = []
    assert [chunk.weight_version for chunk in chunks] == sorted(chunk.weight_version for chunk in chunks)
    for chunk in chunks:
        end = len(ids) + len(chunk.token_ids)
        written = toy_generate(prompt, params, weights=chunk.weight_version, begun=ids)
        ids += chunk.token_ids
        assert ids == written[:end]


async def test_running_and_waiting_requests_go_on_with_the_new_weights(make_engine: MakeEngine) -> None:
    async with make_engine(max_running_requests=2) as engine:
        streams = [engine.generate([*PROMPT, each], LONG) for each in range(4)]
        first = await anext(streams[0])
        assert first.weight_version == 0
        assert await engine.update_weights(weights(1)) == 1 == engine.weight_version
        rest = await asyncio.gather(*map(chunks_of, streams))
        rest[0].insert(0, first)
        for each, chunks in enumerate(rest):
            check_chunks(chunks, [*PROMPT, each], LONG)
            assert chunks[-1].weight_version == 1
        mixed, fresh = streams[0].result(), streams[3].result()
        assert (mixed.weight_version, mixed.identical) == (1, False)
        assert (fresh.weight_version, fresh.identical) == (1, True)
        assert engine.stats().weight_version == 1
        await settle(engine)


async def test_no_kv_of_earlier_weights_is_found(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        before = await engine.generate(PROMPT * 4, SHORT)
        assert engine.cached_tokens(PROMPT * 4) > 0
        await engine.update_weights(weights(1))
        assert engine.cached_tokens(PROMPT * 4) == 0
        stats = engine.stats()
        assert stats.pages_free == stats.pages_total
        after = await engine.generate(PROMPT * 4, SHORT)
        assert after.usage.cached_tokens == 0
        assert after.token_ids == toy_generate(PROMPT * 4, SHORT, weights=1) != before.token_ids
        assert engine.cached_tokens(PROMPT * 4) > 0


async def test_with_wait_what_has_begun_ends_first_and_what_arrives_is_all_new(
    make_engine: MakeEngine,
) -> None:
    async with make_engine(max_running_requests=2, max_queued_requests=3) as engine:
        begun = [engine.generate([*PROMPT, each], LONG) for each in range(2)]
        await asyncio.gather(*map(anext, begun))
        await engine.pause()
        waiting = engine.generate(PROMPT, SHORT)
        updating = asyncio.ensure_future(engine.update_weights(weights(1), mode="wait"))
        while not engine._core.holding_back:
            await asyncio.sleep(0.001)
        late = [engine.generate([7, each], SHORT) for each in range(2)]
        with pytest.raises(errors.Rejected):
            engine.generate([7, 8, 9], SHORT)
        engine.resume()
        for each, stream in enumerate(begun):
            result = await stream
            assert result.token_ids == toy_generate([*PROMPT, each], LONG)
            assert (result.weight_version, result.identical) == (0, True)
        assert await updating == 1
        assert (await waiting).token_ids == toy_generate(PROMPT, SHORT, weights=1)
        for each, stream in enumerate(late):
            assert (await stream).token_ids == toy_generate([7, each], SHORT, weights=1)
        await settle(engine)


async def test_with_abort_what_has_begun_ends_and_what_waits_goes_on(make_engine: MakeEngine) -> None:
    async with make_engine(max_running_requests=1) as engine:
        running = engine.generate(PROMPT, LONG)
        await anext(running)
        waiting = engine.generate([4, 5], SHORT)
        await engine.update_weights(weights(1), mode="abort")
        with pytest.raises(errors.Cancelled, match="weights of the model were replaced"):
            await running
        assert (await waiting).token_ids == toy_generate([4, 5], SHORT, weights=1)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"weights": "none"}, {}, "weights: of a toy they are one integer"),
        (5, {}, "weights: must be a path, or names and tensors, got 5"),
        (weights(1), {"mode": "now"}, "mode: must be one of keep, wait, abort, got 'now'"),
        (weights(1), {"version": 0}, "version: must be an integer greater than 0, got 0"),
        (weights(1), {"version": True}, "version: must be an integer greater than 0, got True"),
    ],
)
async def test_what_is_no_update_changes_nothing(
    make_engine: MakeEngine, source: Any, options: dict[str, Any], message: str
) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        with pytest.raises(errors.ConfigError) as refused:
            await engine.update_weights(source, **options)
        assert str(refused.value) == message
        result = await stream
        assert result.token_ids == toy_generate(PROMPT, LONG)
        assert (result.weight_version, result.identical, engine.weight_version) == (0, True, 0)
        assert engine.stats().retractions == 0


async def test_updates_take_place_in_their_order_and_versions_can_be_given(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        given = [engine.update_weights(weights(each)) for each in (1, 2)]
        assert await asyncio.gather(*given) == [1, 2]
        assert await engine.update_weights(weights(40), version=40) == 40
        check_chunks(await chunks_of(stream), PROMPT, LONG)
        assert (await engine.generate(PROMPT, SHORT)).token_ids == toy_generate(PROMPT, SHORT, weights=40)


async def test_a_paused_engine_stays_paused(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        await engine.pause()
        await engine.update_weights(weights(1))
        steps = engine.stats().steps
        for _ in range(20):
            await asyncio.sleep(0)
        assert (engine.stats().paused, engine.stats().steps) == (True, steps)
        engine.resume()
        assert (await stream).weight_version == 1


class Slow(ToyDevice):
    """Reads and installs weights when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read, self.may_install = threading.Event(), threading.Event()
        self.reading, self.installing = threading.Event(), threading.Event()
        self.stopped = False

    def prepare_weights(self, given: Any, go_on: Callable[[], None]) -> int:
        self.reading.set()
        while not self.may_read.wait(0.001):
            try:
                go_on()
            except BaseException:
                self.stopped = True
                raise
        return super().prepare_weights(given, go_on)

    def install_weights(self, prepared: int) -> None:
        self.installing.set()
        self.may_install.wait()
        super().install_weights(prepared)


async def test_cancelled_while_it_reads_it_stops_reading_and_changes_nothing(make_engine: MakeEngine) -> None:
    device = Slow()
    async with make_engine(device=device) as engine:
        updating = asyncio.ensure_future(engine.update_weights(weights(1)))
        await asyncio.to_thread(device.reading.wait)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert device.stopped
        assert (await engine.generate(PROMPT, SHORT)).token_ids == toy_generate(PROMPT, SHORT)
        device.may_read.set()
        device.may_install.set()
        assert await engine.update_weights(weights(1)) == 1


async def test_prompts_are_tokenized_on_all_threads_while_it_reads(make_engine: MakeEngine) -> None:
    device = Slow()
    device.may_install.set()
    both = threading.Barrier(2, timeout=60)
    async with make_engine(device=device) as engine:
        updating = asyncio.ensure_future(engine.update_weights(weights(1)))
        await asyncio.to_thread(device.reading.wait)
        intake = engine._serving()._intake
        try:
            await asyncio.gather(*(intake.run(both.wait) for _ in range(2)))
        finally:
            device.may_read.set()
        assert await updating == 1


async def test_cancelled_while_it_installs_it_is_completed(make_engine: MakeEngine) -> None:
    device = Slow()
    device.may_read.set()
    async with make_engine(device=device) as engine:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        updating = asyncio.ensure_future(engine.update_weights(weights(1)))
        await asyncio.to_thread(device.installing.wait)
        for _ in range(3):
            updating.cancel()
            await asyncio.sleep(0)
            assert not updating.done(), "its tensors are still read"
        device.may_install.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert device.weights == 1 == engine.weight_version
        assert (await stream).weight_version == 1


class Unstoppable(Slow):
    """Reads a tensor that takes long."""

    def prepare_weights(self, given: Any, go_on: Callable[[], None]) -> int:
        self.reading.set()
        self.may_read.wait()
        go_on()
        return ToyDevice.prepare_weights(self, given, go_on)


@pytest.mark.parametrize("closing", [False, True])
async def test_however_often_it_is_cancelled_it_returns_when_it_reads_no_more(
    make_engine: MakeEngine, closing: bool
) -> None:
    device = Unstoppable()
    async with make_engine(device=device) as engine:
        updating = asyncio.ensure_future(engine.update_weights(weights(1)))
        await asyncio.to_thread(device.reading.wait)
        closed = None
        for _ in range(3):
            updating.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not updating.done(), "its tensors are still read"
            if closing and closed is None:
                closed = asyncio.ensure_future(engine.aclose())
        device.may_read.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        if closed is not None:
            await closed
        assert device.weights == 0


@pytest.mark.parametrize("stage", ["reading", "waiting", "installing"])
async def test_closing_amid_an_update(make_engine: MakeEngine, stage: str) -> None:
    device = Slow()
    engine = make_engine(device=device)
    await engine.start()
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    if stage != "reading":
        device.may_read.set()
    if stage == "waiting":
        await engine.pause()
    mode = "wait" if stage == "waiting" else "keep"
    updating = asyncio.ensure_future(engine.update_weights(weights(1), mode=mode))  # type: ignore[arg-type]
    if stage == "waiting":
        while not engine._core.holding_back:
            await asyncio.sleep(0.001)
    else:
        await asyncio.to_thread(getattr(device, stage).wait)
    closing = asyncio.ensure_future(engine.aclose())
    await asyncio.sleep(0)
    device.may_read.set()
    device.may_install.set()
    await closing
    assert engine.state is EngineState.CLOSED
    if stage == "installing":
        assert await updating == 1
    else:
        with pytest.raises(errors.EngineClosed):
            await updating
    with pytest.raises(errors.EngineClosed):
        await stream


async def test_what_fails_half_way_fails_the_engine(make_engine: MakeEngine) -> None:
    class Broken(ToyDevice):
        def install_weights(self, prepared: int) -> None:
            raise MemoryError("half of it")

    engine = make_engine(device=Broken())
    await engine.start()
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    with pytest.raises(errors.EngineFailed, match="half of it"):
        await engine.update_weights(weights(1))
    assert engine.state is EngineState.FAILED
    with pytest.raises(errors.EngineFailed):
        await stream
    with pytest.raises(errors.EngineFailed):
        await engine.update_weights(weights(1))
    await engine.aclose()


async def test_a_device_without_such_methods_is_refused(make_engine: MakeEngine) -> None:
    class Plain:
        """A device of somebody's own."""

        synchronous = True

        def __init__(self) -> None:
            self._toy = ToyDevice()
            self.open, self.prepare, self.launch = self._toy.open, self._toy.prepare, self._toy.launch
            self.check, self.close, self.lane = self._toy.check, self._toy.close, self._toy.lane

    async with make_engine(device=Plain()) as engine:
        with pytest.raises(errors.ConfigError, match="a Plain has none that can be replaced"):
            await engine.update_weights(weights(1))


async def test_a_stream_that_is_resumed_with_other_weights_says_so(make_engine: MakeEngine) -> None:
    async with make_engine(seed=1) as engine:
        stream = engine.generate(PROMPT, LONG)
        first = await anext(stream)
        stored = stream.checkpoint()
        stream.close()
        assert stored.weight_version == 0
        assert "weight_version" not in stored.to_json(), "earlier releases read it"
        await engine.update_weights(weights(1))
        resumed = engine.restore(StreamCheckpoint.from_json(stored.to_json()))
        check_chunks([first, *await chunks_of(resumed)], PROMPT, LONG)
        result = resumed.result()
        assert (result.weight_version, result.identical) == (1, False)
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        again = StreamCheckpoint.from_json(stream.checkpoint().to_json())
        stream.close()
        assert again.weight_version == 1
        assert (await engine.restore(again)).token_ids == toy_generate(PROMPT, LONG, weights=1)


async def test_logprobs_of_a_prompt_are_not_resumed_under_other_weights(make_engine: MakeEngine) -> None:
    params, prompt = SHORT.changed(prompt_logprobs=0), [*range(1, 41)]
    async with make_engine(chunk_size=8, max_running_requests=4, max_step_tokens=8) as engine:
        stream = engine.generate(prompt, params)
        while not (known := stream._cell.output.prompt_logprobs):
            await asyncio.sleep(0)
        stored = stream.checkpoint()
        stream.close()
        assert 0 < len(stored.prompt_logprobs) == len(known)
        assert not stored.token_ids
        await engine.update_weights(weights(1))
        resumed = engine.restore(stored)
        while not resumed.admitted:
            assert not resumed._cell.output.prompt_logprobs
            await asyncio.sleep(0)
        result = await resumed
        assert len(result.prompt_logprobs or ()) == 40
        assert result.token_ids == toy_generate(prompt, params, weights=1)
        assert result.weight_version == 1


async def test_from_another_thread(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        remote = engine.threadsafe()
        assert await asyncio.to_thread(lambda: remote.update_weights(weights(1)).result()) == 1
        assert (await engine.generate(PROMPT, SHORT)).weight_version == 1


def test_without_a_loop() -> None:
    with make_llm(max_running_requests=1) as llm:
        llm.add_request(PROMPT, LONG)
        waiting = llm.add_request([4, 5], SHORT)
        for _ in range(10):
            llm.step()
        assert llm.update_weights(weights(1), mode="abort") == 1 == llm.weight_version
        with pytest.raises(errors.Cancelled):
            llm.step()
        found: dict[int, Result] = {}
        while llm.has_unfinished():
            found |= llm.step()
        assert found[waiting].token_ids == toy_generate([4, 5], SHORT, weights=1)
        with pytest.raises(errors.ConfigError):
            llm.update_weights({"weights": None})
        assert llm.generate([PROMPT], SHORT)[0].token_ids == toy_generate(PROMPT, SHORT, weights=1)


@pytest.mark.parametrize("settings", [SamplingParams(max_tokens=0), SHORT])
def test_logprobs_of_a_prompt_without_output_are_all_of_the_new_weights(settings: SamplingParams) -> None:
    prompt, params = [*range(1, 41)], settings.changed(prompt_logprobs=0)
    with make_llm(overlap_steps=0, chunk_size=8, max_step_tokens=32) as llm:
        key = llm.add_request(prompt, params)
        llm.step()
        llm.step()
        cell = llm._open[key].cell
        assert 0 < len(cell.output.prompt_logprobs) < 39
        llm.update_weights(weights(1))
        assert not cell.output.prompt_logprobs, "those of the earlier weights"
        found: dict[int, Result] = {}
        while llm.has_unfinished():
            found |= llm.step()
    with make_llm(overlap_steps=0) as llm:
        llm.update_weights(weights(1))
        (wanted,) = llm.generate([prompt], params)
    assert found[key].prompt_logprobs == wanted.prompt_logprobs
    assert found[key].token_ids == wanted.token_ids
    assert (found[key].weight_version, found[key].identical) == (1, True)


async def test_a_policy_that_raises_when_it_is_held_back_holds_back_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine(max_running_requests=1) as engine:
        running, waiting = engine.generate(PROMPT, LONG), engine.generate([4, 5], SHORT)
        await anext(running)
        policy = type(engine._core.scheduler.queues.waiting)

        def raising(self: object, request: Sequence) -> None:
            raise ValueError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(policy, "remove", raising)
            with pytest.raises(ValueError, match="planted"):
                await engine.update_weights(weights(1), mode="wait")
        for stream in (waiting, engine.generate([7, 8], SHORT)):
            async with asyncio.timeout(60):
                assert (await stream).weight_version == 0
        assert engine.weight_version == 0


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_paused_engine_reports_what_a_policy_raises_when_weights_are_replaced(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, mode: UpdateMode
) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        if mode == "keep":
            await anext(stream)
        await engine.pause()
        await stream.accepted()
        reading = asyncio.ensure_future(stream)
        await asyncio.sleep(0)
        policy = type(engine._core.scheduler.queues.waiting)

        def raising(self: object, request: Sequence) -> None:
            raise ValueError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(policy, "add", raising)
            assert await engine.update_weights(weights(1), mode=mode) == 1
            async with asyncio.timeout(60):
                with pytest.raises(errors.StepFailed, match="planted"):
                    await reading
        assert engine.stats().paused
        engine.resume()
        assert (await engine.generate(PROMPT, SHORT)).weight_version == 1
        await settle(engine)


def test_a_model_with_the_weights_of_another_writes_what_that_one_does(tmp_path: Path) -> None:
    configs = []
    for seed in range(2):
        path = tmp_path / str(seed)
        make_model(*FAMILIES["qwen3"], path, seed=seed)
        configs.append(EngineConfig(model=str(path), dtype="float32", num_pages=32, max_running_requests=2))
    with LLM(configs[1]) as llm:
        wanted = llm.generate([PROMPT * 4], SHORT)[0].token_ids
    with LLM(configs[0]) as llm:
        assert llm.generate([PROMPT * 4], SHORT)[0].token_ids != wanted
        llm.update_weights(configs[1].model_path)
        assert llm.generate([PROMPT * 4], SHORT)[0].token_ids == wanted
