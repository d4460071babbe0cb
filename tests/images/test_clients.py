"""Clients of other protocols ask the bundled model about drawings, with images in every form they have."""

from __future__ import annotations

import base64
import io
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from aioinfer import Engine, EngineConfig
from aioinfer.config import ServerConfig
from examples.training.drawing_tasks import describe
from examples.training.drawings import Mark, Scene, draw
from tests.server.conftest import run_server
from tests.server.programs.environments import NONE, node_module
from tests.server.test_programs import PROGRAMS, printed
from tests.tiers import PROGRAM, SECONDS, nightly, rest

STAR = Scene("one", (Mark("star", "red"),), "white")
SEVEN = Scene("number", (Mark("7", "blue"),), "yellow")
ASKED = "Describe the image."


def encoded(scene: Scene, form: str = "PNG") -> str:
    file = io.BytesIO()
    draw(scene, random.Random(5)).save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def uri(scene: Scene) -> str:
    return f"data:image/png;base64,{encoded(scene)}"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    engine = Engine(EngineConfig(model="tiny-vision", threads=1))
    async with engine, run_server(engine, ServerConfig(port=0)) as running:
        yield str(running.url)


def chat(parts: list[dict[str, Any]], role: str = "user") -> list[Any]:
    return [{"role": role, "content": parts}]


async def completion(client: openai.AsyncOpenAI, parts: list[dict[str, Any]]) -> str:
    answer = await client.chat.completions.create(model="tiny-vision", messages=chat(parts), temperature=0)
    return answer.choices[0].message.content or ""


async def streamed(client: openai.AsyncOpenAI, parts: list[dict[str, Any]]) -> str:
    stream = await client.chat.completions.create(
        model="tiny-vision", messages=chat(parts), temperature=0, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


@rest(SECONDS)
@pytest.mark.parametrize("ask", [completion, streamed])
async def test_openai_chat_completions_see(url: str, ask: Callable[..., Any]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for scene in (STAR, SEVEN):
            image = {"type": "image_url", "image_url": {"url": uri(scene), "detail": "auto"}}
            text = {"type": "text", "text": ASKED}
            assert await ask(client, [image, text]) == describe(scene)
            assert await ask(client, [text, image]) == describe(scene)


@rest(SECONDS)
async def test_openai_responses_see_and_go_on(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        content = [{"type": "input_image", "image_url": uri(STAR)}, {"type": "input_text", "text": ASKED}]
        given: Any = [{"role": "user", "content": content}]
        first = await client.responses.create(model="tiny-vision", input=given, temperature=0)
        assert first.output_text == describe(STAR)
        asked: Any = "What color is the star?"
        second = await client.responses.create(
            model="tiny-vision", input=asked, temperature=0, previous_response_id=first.id
        )
        assert second.output_text == "The star is red."


@rest(SECONDS)
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
async def test_anthropic_messages_see(url: str, form: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        source = {"type": "base64", "media_type": f"image/{form.lower()}", "data": encoded(SEVEN, form)}
        parts: Any = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
        messages: Any = chat(parts)
        counted = await client.messages.count_tokens(model="tiny-vision", messages=messages)
        found: Any = await client.messages.create(model="tiny-vision", max_tokens=48, messages=messages)
        assert found.content[0].text == describe(SEVEN)
        assert found.usage.input_tokens == counted.input_tokens > 16
        async with client.messages.stream(model="tiny-vision", max_tokens=48, messages=messages) as stream:
            assert await stream.get_final_text() == describe(SEVEN)


@nightly(PROGRAM)
async def test_the_ai_sdk_sees_by_each_provider_and_form(url: str, tmp_path: Path) -> None:
    node, modules = node_module(".bin/node"), node_module("")
    if node is None or modules is None or node_module("ai") is None:
        pytest.skip(NONE.format("ai"))
    (tmp_path / "star.png").write_bytes(base64.b64decode(encoded(STAR)))
    # Node looks for modules beside the program.
    shutil.copy(PROGRAMS / "ai_sdk_sees.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    command = (node, "--no-warnings", tmp_path / "ai_sdk_sees.mjs")
    said = await printed(command, url, str(tmp_path / "star.png"), environment=dict(os.environ))
    providers, forms = 4, 3
    assert said == [f"run {describe(STAR)}", f"stream {describe(STAR)}"] * providers * forms
