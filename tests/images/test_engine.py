"""An engine writes behind prompts with images what transformers does, however it comes to that."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aioinfer import Engine, EngineConfig, SamplingParams
from aioinfer.execution.device import DeviceLost
from aioinfer.loop.options import PromptSource
from tests.images.checkpoints import picture
from tests.images.families import FAMILIES, Family, generated
from tests.parallel.framed import local
from tests.parallel.toys import lose_engine
from tests.tiers import SECONDS, rest

#: tokens of an output
MOST = 6
#: what a prompt has: texts, and the widths and heights of images
PROMPTS: dict[str, Sequence[str | tuple[int, int]]] = {
    "first": [(40, 30), "what is in it?"],
    "last": ["tell me about ", (64, 64)],
    "two": ["left ", (40, 30), " and right ", (30, 70), "?"],
    "turned": ["left ", (30, 70), " and right ", (40, 30), "?"],
    "five": [(16, 16), (90, 20), "a", (33, 31), "b", (40, 30), (20, 64), "which is the largest?"],
    "text": ["there is no image at all in this one, but some words"],
}


class Written(NamedTuple):
    """A checkpoint, and what transformers writes with it."""

    path: Path
    model: Any


@functools.cache
def _made(family: str, root: Path) -> Written:
    path = root / family
    path.mkdir()
    return Written(path, FAMILIES[family].write(path))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def messages(name: str) -> list[Mapping[str, Any]]:
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": picture(*part)}
        for part in PROMPTS[name]
    ]
    return [{"role": "user", "content": parts}]


async def prompts_of(engine: Engine) -> dict[str, PromptSource]:
    return {name: engine.prompt(messages(name)) for name in PROMPTS}


def expected(
    family: Family, model: Any, prompts: Mapping[str, PromptSource], token_id: int
) -> dict[str, list[int]]:
    return {
        name: generated(family, model, prompt.encode(), prompt.images, token_id, MOST)
        for name, prompt in prompts.items()
    }


async def read(engine: Engine, prompt: PromptSource, turns: int = 0) -> list[int]:
    for _ in range(turns):
        await asyncio.sleep(0)
    result = await engine.generate(prompt, SamplingParams(max_tokens=MOST, temperature=0, ignore_eos=True))
    return list(result.token_ids)


async def all_of(engine: Engine, prompts: Mapping[str, PromptSource]) -> dict[str, list[int]]:
    """The outputs of all, which arrive one after the other and run beside each other."""
    found = await asyncio.gather(*(read(engine, each, 40 * at) for at, each in enumerate(prompts.values())))
    return dict(zip(prompts, found, strict=True))


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks of 7": {"chunk_size": 7},
    "no window": {"overlap_steps": 0, "chunk_size": 40},
    "window of 2": {"overlap_steps": 2, "prefix_cache": False},
    "slices": {"max_encoder_tokens": 8, "encoder_cache_gib": 0.0},
    "torch": {"attention_backend": "sdpa"},
    "states amid images": {"state_snapshot_tokens": 16, "page_size": 4, "chunk_size": 16},
}


@rest(SECONDS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_outputs_are_those_of_transformers(family: str, settings: str, checkpoints: Path) -> None:
    written = _made(family, checkpoints)
    config = EngineConfig(model=str(written.path), dtype="float32", **SETTINGS[settings])
    async with Engine(config) as engine:
        assert engine.info.images is not None
        prompts = await prompts_of(engine)
        wanted = expected(FAMILIES[family], written.model, prompts, engine.info.images.token_id)
        assert await all_of(engine, prompts) == wanted
        encoded = engine.stats().encoded_images
        assert encoded
        assert await all_of(engine, prompts) == wanted
        if engine.config.encoder_cache_gib:
            assert engine.stats().encoded_images == encoded, "their features were kept"


@rest(SECONDS)
@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "qwen3.5"])
async def test_a_request_that_loses_its_pages_amid_an_image_goes_on(family: str, checkpoints: Path) -> None:
    written = _made(family, checkpoints)
    config = EngineConfig(model=str(written.path), dtype="float32", chunk_size=8, page_size=4)
    async with Engine(config) as engine:
        assert engine.info.images is not None
        prompts = await prompts_of(engine)
        wanted = expected(FAMILIES[family], written.model, prompts, engine.info.images.token_id)
        reading = asyncio.ensure_future(all_of(engine, prompts))
        scheduler, retracted = engine._core.scheduler, 0
        while not reading.done():
            for sequence in [*scheduler.queues.prefilling.values()]:
                images = sequence.output.images
                at = sequence.cursor.computed
                amid = images is not None and any(unit.start < at < unit.stop for unit in images.units)
                if sequence.recovery.retractions < 2 and (amid or (at and family == "gemma3")):
                    scheduler.retract(sequence)
                    retracted += 1
            engine._started().driver.wake()
            await asyncio.sleep(0)
        assert await reading == wanted
        assert retracted


@rest(SECONDS)
@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "qwen3-vl", "lfm2-vl"])
async def test_a_stream_whose_replica_is_lost_goes_on_with_its_images(family: str, checkpoints: Path) -> None:
    written = _made(family, checkpoints)
    config = EngineConfig(model=str(written.path), dtype="float32")
    engines = [Engine(config), Engine(config)]
    for engine in engines:
        await engine.start()
    assert engines[0].info.images is not None
    prompts = await prompts_of(engines[0])
    wanted = expected(FAMILIES[family], written.model, prompts, engines[0].info.images.token_id)
    async with local(engines) as dispatcher:
        params = SamplingParams(max_tokens=MOST, temperature=0, ignore_eos=True)
        streams = [dispatcher.generate(messages(name), params) for name in PROMPTS]
        first = await anext(streams[-1])
        lose_engine(engines[0], DeviceLost("it is gone"))
        results = [await stream for stream in streams]
        assert {name: list(each.token_ids) for name, each in zip(PROMPTS, results, strict=True)} == wanted
        assert first.token_ids
    for engine in engines:
        await engine.aclose()


async def test_the_same_image_is_found_and_another_is_not(checkpoints: Path) -> None:
    written = _made("smolvlm", checkpoints)
    async with Engine(EngineConfig(model=str(written.path), dtype="float32", page_size=4)) as engine:

        async def cached(seed: int) -> int:
            content = [{"type": "image", "image": picture(40, 30, seed)}, {"type": "text", "text": "what?"}]
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            result = await engine.generate([{"role": "user", "content": content}], params)
            return result.usage.cached_tokens

        assert await cached(0) == 0
        assert await cached(0) > 100
        front = await cached(1)
        assert 0 < front < 20, "what is in front of the image"
        pixels = picture(40, 30, 0)
        pixels.putpixel((7, 7), (1, 2, 3))
        content = [{"type": "image", "image": pixels}, {"type": "text", "text": "what?"}]
        found = await engine.generate([{"role": "user", "content": content}], SamplingParams(max_tokens=1))
        assert found.usage.cached_tokens == front
