"""Most streams are text and ids only: the short ways that these take lead to the same as the long ones."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import aioinfer
from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.loop.core import Core
from aioinfer.loop.options import Prepared
from aioinfer.loop.texts import Texts
from aioinfer.outputs import Chunk
from aioinfer.params import SamplingParams
from aioinfer.request import Output, Request
from aioinfer.scheduling.sequence import Sequence
from aioinfer.stream import StreamCell
from aioinfer.text.tokenizer import HFTokenizer
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.tiers import grid, scaled
from tests.toys import ToyDevice, ToyTokenizer

PROMPT = [1, 2, 3]
FREE: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
BUNDLED = Path(aioinfer.__file__).parent / "bundled" / "tiny-chat"


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.load(BUNDLED)


def byte_level_device(tokenizer: HFTokenizer, **settings: Any) -> ToyDevice:
    """Its outputs are arbitrary tokens: cut characters, broken bytes, special tokens."""
    return ToyDevice(vocab_size=tokenizer.vocab_size, **settings)


async def read(stream: Any, dice: random.Random, slowly: float) -> list[Chunk]:
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        if dice.random() < slowly:
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
    return chunks


def params_of(dice: random.Random) -> SamplingParams:
    given = FREE | {"max_tokens": dice.randint(1, 60), "skip_special_tokens": dice.random() < 0.5}
    if dice.random() < 0.3:
        given |= {"stop": dice.choice(["e", "th", "\ufffd", "zzz"]), "include_stop": dice.random() < 0.5}
    if dice.random() < 0.3:
        given |= {"ignore_eos": False}
    return SamplingParams(**given)


@pytest.mark.parametrize("seed", grid([1], range(2, 8)))
async def test_concatenated_chunks_are_the_decoded_ids_whatever_the_tokens(
    make_engine: MakeEngine, tokenizer: HFTokenizer, seed: int
) -> None:
    dice = random.Random(seed)
    device = byte_level_device(tokenizer, num_pages=200, num_slots=17)
    async with make_engine(
        tokenizer=lambda: tokenizer, device=device, num_pages=200, max_running_requests=8
    ) as engine:
        for _ in range(4):
            prompts = [[dice.randrange(tokenizer.vocab_size) for _ in range(dice.randint(1, 9))]
                       for _ in range(8)]  # fmt: skip
            params = [params_of(dice) for _ in prompts]
            streams = [
                engine.generate(prompt, each, max_lag=dice.choice([None, 3]))
                for prompt, each in zip(prompts, params, strict=True)
            ]
            slowly = dice.choice([0.0, 0.3])
            readings = [read(stream, random.Random(dice.random()), slowly) for stream in streams]
            found = await asyncio.gather(*readings)
            for stream, chunks, prompt, each in zip(streams, found, prompts, params, strict=True):
                result = stream.result()
                assert "".join(chunk.text for chunk in chunks) == result.text
                ids = [token for chunk in chunks for token in chunk.token_ids]
                assert ids == result.token_ids
                ends = [chunk.finish_reason is not None for chunk in chunks]
                assert ends == [False] * (len(chunks) - 1) + [True]
                assert chunks[-1].usage == result.usage
                assert all(chunk.text for chunk in chunks[:-1])
                if not each.stop:
                    if result.finish_reason == "stop":
                        ids = ids[:-1]
                    whole = text_behind(tokenizer, prompt, ids, skip=each.skip_special_tokens)
                    assert result.text == whole
        await settle(engine)


def text_behind(tokenizer: HFTokenizer, prompt: list[int], output: list[int], *, skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    while not whole.startswith(before):
        before = before[:-1]
    return whole.removeprefix(before)


@pytest.mark.parametrize("looks_up", [True, False])
async def test_the_short_way_through_a_stream_gives_the_same_chunks(
    make_engine: MakeEngine, looks_up: bool
) -> None:
    """One after the other, so that they are read at the same moments; one of them is not plain."""
    dice = random.Random(7)
    async with make_engine(
        tokenizer=lambda: ToyTokenizer(looks_up=looks_up), overlap_steps=0, launch_mode="inline"
    ) as engine:
        for _ in range(scaled(30, 6)):
            params, slowly, reading = params_of(dice), dice.choice([0.0, 0.5]), dice.random()
            options = {"max_lag": dice.choice([None, 2, 5])}
            found = []
            for plain in (True, False):
                stream = engine.generate(PROMPT, params, **options)
                assert stream._cell.output.plain
                stream._cell.output.plain = plain
                found.append(await read(stream, random.Random(reading), slowly))
            assert found[0] == found[1]


@pytest.mark.parametrize(
    "given",
    [{"logprobs": 0}, {"stop_regex": "zzz"}, {"logprobs": 2, "stop": "zzz"}],
)
async def test_streams_with_more_than_text_and_ids_are_not_plain(
    make_engine: MakeEngine, given: dict[str, Any]
) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, SamplingParams(**FREE, **given))
        assert not stream._cell.output.plain
        chunks = [chunk async for chunk in stream]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 40
        if "logprobs" in given:
            assert all(len(chunk.logprobs or ()) == len(chunk.token_ids) for chunk in chunks)


async def test_streams_of_engines_without_a_tokenizer_are_not_plain(make_engine: MakeEngine) -> None:
    async with make_engine(tokenizer=None) as engine:
        assert not engine.generate(PROMPT, SamplingParams(**FREE))._cell.output.plain


async def test_a_stream_is_plain_when_its_prompt_is_tokenized(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate("text", SamplingParams(**FREE))
        output = stream.cell.output
        assert not output.plain
        assert [chunk async for chunk in stream][-1].finish_reason == "length"
        assert output.plain


def test_a_stream_read_without_a_loop_says_so(make_engine: MakeEngine) -> None:
    async def begin() -> Any:
        engine = make_engine(launch_mode="inline")
        await engine.start()
        stream = engine.generate(PROMPT, SamplingParams(**FREE))
        await anext(stream)
        return engine, stream

    runner = asyncio.Runner()
    with runner:
        engine, stream = runner.run(begin())
        reading = stream.__anext__()
        with pytest.raises(errors.WrongLoop):
            reading.send(None)
        assert not stream.done
        runner.run(engine.aclose())


async def test_a_reader_that_is_cancelled_and_read_at_once_has_left(
    make_engine: MakeEngine, gate: Gate
) -> None:
    """Its future was set in the same turn of the loop."""
    async with make_engine(fault=gate) as engine:
        stream = engine.generate(PROMPT, SamplingParams(**FREE))
        cell = stream._cell
        task = asyncio.create_task(anext(stream))
        await asyncio.to_thread(gate.arrived.acquire)
        assert cell.waiter is not None
        cell.waiter.set_result(None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cell.waiter is None
        assert stream.done
        assert [chunk async for chunk in stream] == []
        gate.release()
        await settle(engine)


# -- one pass over the texts of a step --------------------------------------------------------------------


class Desk:
    """A core, resolving step by step."""

    def __init__(self, tokenizer: Any, device: ToyDevice) -> None:
        self.device = device
        config = EngineConfig(model="toy", page_size=4, num_pages=200, overlap_steps=0, seed=1)
        self.core = Core(config, device.open(), tokenizer, float)
        self.requests: list[Sequence] = []

    def submit(self, prompt: list[int], params: SamplingParams) -> None:
        cell = StreamCell(Output(Request(params=params)))
        self.requests.append(self.core.submit(cell.output, Prepared(prompt, None), cell))

    def run(self) -> list[list[tuple[Any, ...]]]:
        """What is known of every request after each step."""
        found = []
        while (step := self.core.plan()) is not None:
            updated = self.core.resolve(step, self.device.launch(self.device.prepare(step)).wait())
            found.append([self.known(request, updated) for request in self.requests])
        return [*found, [(self.core.texts.output_tokens,)]]

    def known(self, request: Sequence, updated: list[Sequence]) -> tuple[Any, ...]:
        output = [*request.output_ids], [*request.text.pieces], len(request.output.token_times)
        return (
            request.key,
            *output,
            request.output.finish_reason,
            request.output.stop_reason,
            request in updated,
        )


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_does_what_a_call_per_token_does(
    tokenizer: HFTokenizer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def desk() -> Desk:
        dice = random.Random(seed)
        made = Desk(tokenizer, byte_level_device(tokenizer, num_pages=200, num_slots=40))
        for _ in range(8):
            prompt = [dice.randrange(tokenizer.vocab_size) for _ in range(dice.randint(1, 9))]
            made.submit(prompt, params_of(dice))
        return made

    calls = 0
    advanced = Texts.advanced

    def counted(*given: Any) -> None:
        nonlocal calls
        calls += 1
        advanced(*given)

    monkeypatch.setattr(Texts, "advanced", counted)
    short, few = desk().run(), calls
    calls = 0

    def each(self: Texts, requests: Any, now: float) -> None:
        for request in requests:
            self.advanced(request, now)

    monkeypatch.setattr(Texts, "all_advanced", each)
    assert desk().run() == short
    assert few < calls


def test_a_token_without_an_entry_goes_the_ordinary_way(tokenizer: HFTokenizer) -> None:
    """The vocabulary of a model is often larger than that of its tokenizer."""
    device = ToyDevice(vocab_size=3 * tokenizer.vocab_size, num_pages=200, num_slots=40)
    desk = Desk(tokenizer, device)
    for first in range(4):
        desk.submit([first + 1], SamplingParams(**FREE))
    desk.run()
    for request in desk.requests:
        assert any(token >= tokenizer.vocab_size for token in request.output_ids)
        whole = text_behind(tokenizer, list(request.prompt_ids), request.output_ids, skip=True)
        assert request.text.text == whole


def test_a_negative_token_fails_its_request_alone(tokenizer: HFTokenizer) -> None:
    """None comes from a device; a look-up would take it for one from the end of the vocabulary."""
    desk = Desk(tokenizer, byte_level_device(tokenizer, num_pages=200, num_slots=40))
    desk.submit([1], SamplingParams(**FREE))
    desk.submit([2], SamplingParams(**FREE))
    bad, good = desk.requests
    step = desk.core.plan()
    assert step is not None
    desk.core.resolve(step, desk.device.launch(desk.device.prepare(step)).wait())
    for request in desk.requests:
        request.output_ids.append(-1 if request is bad else 65)
    desk.core.texts.all_advanced([bad, good], 0.0)
    assert isinstance(bad.output.error, errors.StepFailed)
    assert good.output.error is None
    assert len(good.output.token_times) == 2
