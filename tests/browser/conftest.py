"""Pages in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.server import serve
from tests.browser.chromium import NONE, OPTIONS, find
from tests.engine.conftest import Gate
from tests.server.conftest import serving as serving

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

#: a page of a server, in a tab of its own with the given options
OpenPage = Callable[..., AbstractAsyncContextManager["Page"]]
#: the base URL of a server of a bundled model
ServeBundled = Callable[..., AbstractAsyncContextManager[str]]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Headless Chromium, or the test is skipped."""
    program = find()
    if program is None:
        pytest.skip(NONE)
    playwright = pytest.importorskip("playwright.async_api", reason="needs playwright")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=program, args=OPTIONS)
        try:
            yield browser
        finally:
            await browser.close()


@pytest.fixture
def open_page(browser: Browser) -> OpenPage:
    """Opens pages, and fails if one of them logs an error or breaks its policy."""

    @asynccontextmanager
    async def opened(
        url: str, *, width: int = 1280, height: int = 900, refusals: bool = False, **options: Any
    ) -> AsyncIterator[Page]:
        """``refusals``: the server refuses requests, which browsers log."""
        context = await browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(120_000)
        page = await context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        await page.goto(url)
        await page.wait_for_function("() => document.querySelector('#model').textContent !== 'connecting'")
        yield page
        await context.close()
        found = [text for text in errors if not (refusals and text.startswith("Failed to load resource"))]
        assert not found

    return opened


@pytest.fixture
def serve_bundled() -> ServeBundled:
    @asynccontextmanager
    async def run(model: str, settings: dict[str, Any] | None = None, **server: Any) -> AsyncIterator[str]:
        engine = Engine(EngineConfig(model=model, threads=1, dtype="float32", **(settings or {})))
        loop = asyncio.get_running_loop()
        started: asyncio.Future[str] = loop.create_future()
        stop = asyncio.Event()
        config = ServerConfig(port=0, **server)
        async with engine:
            task = loop.create_task(serve(engine, config, stop=stop, ready=started.set_result))
            try:
                yield await started
            finally:
                stop.set()
                await task

    return run


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release()
