"""Most streams are text and ids only: the short ways that these take lead to the same as the long ones."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import aioinfer
from aioinfer.outputs import Chunk
from aioinfer.params import SamplingParams
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


async def test_a_token_without_an_entry_has_the_text_of_none(
    make_engine: MakeEngine, tokenizer: HFTokenizer
) -> None:
    """The vocabulary of a model is often larger than that of its tokenizer."""
    device = ToyDevice(vocab_size=3 * tokenizer.vocab_size, num_pages=200, num_slots=17)
    async with make_engine(tokenizer=lambda: tokenizer, device=device, num_pages=200) as engine:
        results = [await engine.generate([first + 1], SamplingParams(**FREE)) for first in range(4)]
    for first, result in enumerate(results):
        assert any(token >= tokenizer.vocab_size for token in result.token_ids)
        assert result.text == text_behind(tokenizer, [first + 1], result.token_ids, skip=True)
