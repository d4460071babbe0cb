"""Screenshots of the playground for the documentation: ``python -m tests.browser.screenshots``."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.server import serve
from tests.browser.chromium import NONE, OPTIONS, find
from tests.docs.pages import ROOT

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

#: name, model, color scheme, width and height
SHOTS = (
    ("light", "tiny-chat", "light", 1180, 820),
    ("dark", "tiny-diffusion", "dark", 1180, 820),
    ("phone-light", "tiny-chat", "light", 360, 740),
    ("phone-dark", "tiny-diffusion", "dark", 360, 740),
)
STORY = "Tell me a long story about Mara."
#: stops the painting of answers when a draft is well under way
_HOLD = """() => new MutationObserver((_, observer) => {
  const parts = document.querySelectorAll('.draft .known');
  if (parts.length > 2 && document.querySelector('.final').textContent.length > 150) {
    window.requestAnimationFrame = () => 0;
    window.held = true;
    observer.disconnect();
  }
}).observe(document.querySelector('#panes'), {subtree: true, childList: true})"""


async def shoot(
    browser: Browser, url: str, name: str, model: str, scheme: str, size: tuple[int, int]
) -> None:
    page = await browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light", viewport={"width": size[0], "height": size[1]}
    )
    await page.goto(url)
    drafts = model == "tiny-diffusion"
    await page.wait_for_selector(f"text={model},")
    await fill(page, "temperature", "0", 0)
    if drafts:
        await fill(page, "threshold", "0.9999", 0)
        await page.evaluate(_HOLD)
    if size[0] > 760:
        await page.click("#compare")
        await fill(page, "temperature", "0.9", 1)
        await fill(page, "seed", "7", 1)
    await page.fill("#prompt", STORY)
    await page.press("#prompt", "Control+Enter")
    if drafts:
        await page.wait_for_function("() => window.held")
    else:
        await page.wait_for_selector(".figures")
        await page.wait_for_timeout(1200)
    await page.screenshot(path=ROOT / "docs" / f"playground-{name}.png")
    await page.close()


async def fill(page: Page, name: str, value: str, pane: int) -> None:
    field = page.locator(f"[name={name}]").nth(pane)
    await field.evaluate(
        "(each, value) => { each.value = value; each.dispatchEvent(new Event('input', {bubbles: true})) }",
        value,
    )


async def main() -> None:
    from playwright.async_api import async_playwright

    program = find()
    if program is None:
        sys.exit(NONE)
    async with AsyncExitStack() as stack:
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=program, args=OPTIONS)
        for name, model, scheme, *size in SHOTS:
            loop = asyncio.get_running_loop()
            ready: asyncio.Future[str] = loop.create_future()
            stop = asyncio.Event()
            engine = Engine(EngineConfig(model=model, threads=1, max_rounds=1, seed=0))
            config = ServerConfig(port=0)
            served = loop.create_task(serve(engine, config, stop=stop, ready=ready.set_result))
            await shoot(browser, await ready, name, model, scheme, (size[0], size[1]))
            stop.set()
            await served
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
