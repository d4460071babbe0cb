"""Requests with images: through chats, checkpoints, forks, sessions and dispatchers."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from aioinfer import Engine, EngineConfig, SamplingParams, StreamCheckpoint
from aioinfer.errors import InvalidRequest
from aioinfer.images.limits import ImageLimits
from aioinfer.ledger import LEDGER
from aioinfer.loop.given_images import image_processor
from aioinfer.parallel import Dispatcher
from aioinfer.speculation.drafter import DraftRequest
from aioinfer.testing import FakeEngine
from tests.images.checkpoints import picture, smolvlm
from tests.server.test_adversity import until
from tests.tiers import PROGRAM, SECONDS, rest

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONGER = PARAMS.changed(max_tokens=64)
ONE, OTHER = picture(96, 60), picture(40, 80, 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("smolvlm")
    smolvlm(found)
    return found


@pytest.fixture
async def engine(path: Path) -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model=str(path), dtype="float32", max_images=3)) as found:
        yield found


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def asked(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else image(part) for part in parts]
    return [{"role": "user", "content": content}]


async def test_callers_see_ids_of_the_vocabulary(engine: Engine) -> None:
    seen: list[int] = []

    def processor(ids: Any, logits: Any) -> None:
        seen.extend(ids.tolist())

    messages = asked(ONE, "what", OTHER)
    params = PARAMS.changed(
        logits_processors=[processor], repetition_penalty=1.1, prompt_logprobs=0, bad_words=["x"]
    )
    result = await engine.generate(messages, params)
    ids = list(result.prompt_token_ids)
    assert ids == await engine.tokenize(messages)
    assert min(ids) >= 0
    assert min(seen) >= 0
    assert seen[: len(ids)] == ids
    assert result.prompt_logprobs is not None
    assert [each.token_id for each in result.prompt_logprobs[1:] if each is not None] == ids[1:]


class DraftsOfWords:
    """Proposes the words of the prompt's images, behind its own first token."""

    def __init__(self) -> None:
        self.proposed = 0

    def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
        words = [int(token) for token in request.tokens if token < 0]
        self.proposed += bool(words)
        return words[:most]


@rest(SECONDS)
async def test_a_word_is_never_a_draft(path: Path, engine: Engine) -> None:
    plain = await engine.generate(asked(ONE, "what"), PARAMS)
    drafter = DraftsOfWords()
    async with Engine(EngineConfig(model=str(path), dtype="float32"), drafter=drafter) as drafted:
        found = await drafted.generate(asked(ONE, "what"), PARAMS)
        assert found.token_ids == plain.token_ids
        assert drafter.proposed
        assert drafted.stats().drafted_tokens == 0
    # A look-up finds the text in front of an image again, and behind it the image.
    async with Engine(EngineConfig(model=str(path), dtype="float32", speculation="lookup")) as drafted:
        params = LONGER.changed(prediction="what ")
        prompt = asked("what is", ONE, "what is", OTHER, "what is")
        wanted = await engine.generate(prompt, LONGER)
        assert (await drafted.generate(prompt, params)).token_ids == wanted.token_ids


@rest(SECONDS)
async def test_embeddings_of_images_are_hidden_states_of_transformers(path: Path, engine: Engine) -> None:
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    prompt = engine.prompt(asked(ONE, "what", OTHER))
    found = await engine.embed(prompt, normalize=False)
    assert prompt.images is not None
    pixels = np.stack([unit.pixels["pixel_values"] for unit in prompt.images.units])
    ids = torch.tensor([list(prompt.shown())])
    with torch.no_grad():
        hidden = model.model(input_ids=ids, pixel_values=torch.from_numpy(pixels)[None]).last_hidden_state
    assert np.allclose(found.vector, hidden[0, -1].numpy(), atol=2e-5)
    other = await engine.embed(asked(OTHER, "what", ONE), normalize=False)
    assert np.abs(other.vector - found.vector).max() > 1e-3


@rest(SECONDS)
async def test_the_same_image_is_cached_and_another_is_not(engine: Engine) -> None:
    first = await engine.generate(asked(ONE, "what"), PARAMS)
    again = await engine.generate(asked(ONE, "what"), PARAMS)
    pixels = np.asarray(ONE).copy()
    pixels[59, 95, 2] ^= 1
    other = await engine.generate(asked(pixels, "what"), PARAMS)
    assert again.token_ids == first.token_ids
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens > 100
    assert other.usage.cached_tokens < 16
    assert other.prompt_token_ids == first.prompt_token_ids


async def test_of_an_image_only_features_are_kept_when_its_request_has_ended(
    engine: Engine,
) -> None:
    def taken() -> int:
        gc.collect()
        entry = LEDGER.entries().get("images of prompts")
        return 0 if entry is None else entry.taken

    before = taken()
    params = PARAMS.changed(max_tokens=2)
    results = await asyncio.gather(*(engine.generate(asked(picture(30, 30, at)), params) for at in range(5)))
    assert len(results) == 5
    for _ in range(100):
        if taken() == before:
            break
        await asyncio.sleep(0)
    assert taken() == before


@rest(SECONDS)
async def test_a_checkpoint_and_forks_have_the_images(engine: Engine) -> None:
    messages = asked(ONE, "what", OTHER)
    whole = await engine.generate(messages, LONGER)
    stream = engine.generate(messages, LONGER)
    async for _ in stream:
        break
    record, branches = stream.checkpoint().to_json(), stream.fork(2)
    stream.close()
    forks = await asyncio.gather(*branches)
    engine.flush_cache()
    restored = await engine.restore(StreamCheckpoint.from_json(record))
    for each in (*forks, restored):
        assert each.token_ids == whole.token_ids
        assert each.prompt_token_ids == whole.prompt_token_ids
    for broken in (
        record.replace('"images":[', '"images":[null,'),
        record.replace('"size":[96', '"size":[95'),
    ):
        with pytest.raises(InvalidRequest):
            await engine.restore(StreamCheckpoint.from_json(broken))


@rest(SECONDS)
async def test_a_session_keeps_its_images(engine: Engine, tmp_path: Path) -> None:
    async with engine.session() as session:
        await session.chat(asked(ONE, "what"), PARAMS)
        second = await session.chat("and now?", PARAMS)
        assert second.usage.cached_tokens > 100
        assert min(session.token_ids) >= 0
        messages = session.messages
        await session.save(tmp_path / "session")
        expected = await session.chat(asked(OTHER, "this"), PARAMS)
        with pytest.raises(InvalidRequest, match="has images"):
            await session.move("0")
    engine.flush_cache()
    loaded = await engine.load_session(tmp_path / "session")
    assert loaded.messages == messages
    found = await loaded.chat(asked(OTHER, "this"), PARAMS)
    assert (found.content, found.result.prompt_token_ids) == (
        expected.content,
        expected.result.prompt_token_ids,
    )


@rest(SECONDS)
async def test_a_text_session_that_began_with_images_says_so(engine: Engine) -> None:
    async with engine.session() as session:
        await session.generate(asked(ONE, "what"), PARAMS)
        with pytest.raises(InvalidRequest, match="has images"):
            session.generate("more", PARAMS)


async def test_refusals_name_the_part(engine: Engine) -> None:
    async def refused(messages: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            await engine.chat(messages, PARAMS)
        return caught.value

    assert (await refused(asked("a", b"no image"))).field == "messages[0].content[1]"
    assert (await refused(asked("a", "b", 7))).field == "messages[0].content[2]"
    assert "max_images" in str(await refused(asked(ONE, ONE, ONE, ONE)))
    assert (await refused(asked(ONE, "an <image>"))).field == "messages[0].content"
    # What a body can have is never a path.
    assert (await refused([{"role": "user", "content": [{"type": "image", "url": "x"}]}])).field.startswith(
        "messages[0].content[0]"
    )
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        engine.prompt(asked(ONE), truncate_prompt_tokens=9)
    assert (await engine.chat(asked(ONE), PARAMS)).usage.completion_tokens == 8


@pytest.mark.parametrize("settings", [{"images": False}, {"model": "tiny-chat"}])
@rest(SECONDS)
async def test_a_model_without_an_encoder_refuses_before_queueing(path: Path, settings: Any) -> None:
    async with Engine(EngineConfig(**{"model": str(path), "dtype": "float32", **settings})) as engine:
        for call in (engine.generate, engine.chat, engine.prompt):
            with pytest.raises(InvalidRequest, match="reads no images") as caught:
                call(asked("a", ONE))
            assert caught.value.field == "messages[0].content[1]"
        assert engine.stats().waiting == 0


async def test_a_scripted_engine_refuses_them() -> None:
    async with FakeEngine() as engine:
        with pytest.raises(InvalidRequest, match="reads no images"):
            await engine.chat(asked(ONE))


@rest(PROGRAM)
@pytest.mark.parametrize("processes", [0, 1])
async def test_replicas_compute_what_one_engine_does(path: Path, engine: Engine, processes: int) -> None:
    messages = asked(ONE, "what", OTHER)
    expected = await engine.generate(messages, LONGER)
    config = EngineConfig(model=str(path), dtype="float32")
    engines = [] if processes else [Engine(config), Engine(config)]
    async with Dispatcher(engines, config=config if processes else None, processes=processes) as dispatcher:
        results = await asyncio.gather(*(dispatcher.generate(messages, LONGER) for _ in range(3)))
        stream = dispatcher.generate(messages, LONGER)
        async for _ in stream:
            break
        checkpoint = stream.checkpoint()
        stream.close()
        results.append(await dispatcher.restore(checkpoint))
    for result in results:
        assert result.token_ids == expected.token_ids
        assert result.prompt_token_ids == expected.prompt_token_ids


class Processing:
    """Counts the images that are processed, and holds the first until it is released."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, held: bool = False) -> None:
        self.count, self.begun, self.release = 0, threading.Event(), threading.Event()
        processor = image_processor(engine.tokenizer)
        process = processor.process  # type: ignore[union-attr]

        def counted(*given: Any) -> Any:
            self.count += 1
            self.begun.set()
            if held:
                self.release.wait()
            return process(*given)

        monkeypatch.setattr(processor, "process", counted)


async def test_images_that_nobody_waits_for_are_not_processed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Processing(engine, monkeypatch, held=True)
    prompt = engine.prompt(asked(ONE, OTHER, picture(30, 30)))
    streams = [engine.generate(prompt, PARAMS) for _ in range(2)]
    await asyncio.to_thread(seen.begun.wait)
    for stream in streams:
        stream.close()
    while engine._started()._intake._wanted:
        await asyncio.sleep(0)
    seen.release.set()
    # The thread takes one prompt with images after the other.
    assert (await engine.generate(asked(OTHER), PARAMS)).usage.completion_tokens == 8
    assert seen.count == 2
    # One that comes back for it has it.
    assert (await engine.generate(prompt, PARAMS)).usage.completion_tokens == 8
    assert seen.count == 5


async def test_a_request_that_comes_while_others_leave_has_its_images(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Processing(engine, monkeypatch, held=True)
    prompt = engine.prompt(asked(ONE, OTHER))
    first = engine.generate(prompt, PARAMS)
    await asyncio.to_thread(seen.begun.wait)
    first.close()
    while engine._started()._intake._wanted:
        await asyncio.sleep(0)
    second = engine.generate(prompt, PARAMS)
    seen.release.set()
    assert (await second).usage.completion_tokens == 8


async def test_no_more_images_are_processed_than_the_context_has_room_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Processing(engine, monkeypatch)
    processor = image_processor(engine.tokenizer)
    monkeypatch.setattr(processor, "limits", ImageLimits(most=32))
    with pytest.raises(InvalidRequest, match="positions of images, and more") as caught:
        await engine.generate(asked(*[ONE] * 32), PARAMS)
    assert caught.value.code == "context_length_exceeded"
    assert seen.count == engine.info.max_model_len // 112 + 1


async def test_an_idle_engine_holds_no_images(engine: Engine) -> None:
    def held() -> int:
        gc.collect()
        found = LEDGER.entries().get("images of prompts")
        return 0 if found is None else found.promised

    # Engines of other tests may be there still, since aiohttp keeps applications.
    before = held()
    streams = [engine.generate(asked(picture(50, 40, at)), PARAMS) for at in range(6)]
    await streams[0].accepted()
    assert held() > before
    await asyncio.gather(*streams)
    del streams
    await until(lambda: held() <= before)
