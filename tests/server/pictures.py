"""Pictures, and a server of a scripted engine that takes them."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
from PIL import Image

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.testing import FakeEngine
from tests.server.calls import http
from tests.server.conftest import Served, run_server

__all__ = ["encoded", "image_url", "picture", "seeing", "uri"]


def picture(color: str = "red", size: tuple[int, int] = (8, 6), kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind, **options)
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(data)}"


def image_url(url: str, **more: Any) -> Any:
    """A part of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


@asynccontextmanager
async def seeing(*, images: bool = True, **server: Any) -> AsyncIterator[Served]:
    """A server whose model takes images, and answers "Seen."."""
    config = EngineConfig(
        model="fake", num_pages=4096, overlap_steps=0, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    engine = FakeEngine({"": "Seen."}, config=config, images=images)
    async with run_server(engine, ServerConfig(port=0, **server)) as running, http(running.url) as calls:
        yield Served(engine, None, running, calls)


def claude(served: Served) -> anthropic.AsyncAnthropic:
    """A client of Anthropic's protocol."""
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
