"""The playground in Chromium: answers appear and stop, the timeline moves, axe finds no fault."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from tests.browser.chromium import NONE, OPTIONS, find
from tests.engine.conftest import Gate
from tests.server.conftest import Serving, run_server
from tests.server.conftest import gate as gate
from tests.server.conftest import serving as serving
from tests.server.test_adversity import idle, until
from tests.tiers import PROGRAM

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

#: One loop: the browser is another process, which sees no difference.
pytestmark = [pytest.mark.nightly(PROGRAM), pytest.mark.asyncio(loop_factories=["uvloop"])]

STORY = "Tell me a long story about Mara."
OpenPage = Callable[..., AbstractAsyncContextManager["Page"]]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Headless Chromium, or the test is skipped."""
    program = find()
    if program is None:
        pytest.skip(NONE)
    playwright = pytest.importorskip("playwright.async_api", reason="needs playwright")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=program, args=OPTIONS)
        yield browser
        await browser.close()


@pytest.fixture
def open_page(browser: Browser) -> OpenPage:
    """Opens pages, and fails if one of them logs an error or breaks its policy."""

    @asynccontextmanager
    async def opened(
        url: str, *, width: int = 1280, refusals: bool = False, **options: Any
    ) -> AsyncIterator[Page]:
        """``refusals``: the server refuses requests, which browsers log."""
        context = await browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(60_000)
        page = await context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        await page.goto(url)
        await page.wait_for_function("() => document.querySelector('#model').textContent !== 'connecting'")
        yield page
        await context.close()
        assert not [text for text in errors if not (refusals and text.startswith("Failed to load resource"))]

    return opened


@asynccontextmanager
async def bundled(model: str, **settings: Any) -> AsyncIterator[str]:
    """The base URL of a server of a bundled model."""
    engine = Engine(EngineConfig(model=model, threads=1, dtype="float32", **settings))
    async with engine, run_server(engine, ServerConfig(port=0)) as running:
        yield running.url


async def ask(page: Page, text: str, **fields: str) -> None:
    """Set parameters, write a message, and send it without the mouse."""
    for name, value in fields.items():
        await page.locator("main details").evaluate("each => { each.open = true }")
        await page.locator(f"[name={name}], #{name}").fill(value)
    await page.fill("#prompt", text)
    await page.press("#prompt", "Control+Enter")


async def answered(page: Page, count: int = 1) -> tuple[str, str]:
    """The text and the figures of the last of so many answers, when it has ended."""
    await page.wait_for_function(
        "count => document.querySelectorAll('.figures').length === count"
        " && !document.querySelector('[aria-busy=true]')",
        arg=count,
    )
    last = page.locator(".answer").last
    return (
        str(await last.locator(".final").text_content()),
        str(await last.locator(".figures").text_content()),
    )


async def wait_for_tile(page: Page, name: str, value: str) -> None:
    await page.wait_for_function(
        "([name, value]) => [...document.querySelectorAll('#gauges div')].some("
        "each => each.children[0].textContent === name && each.children[1].textContent === value)",
        arg=[name, value],
    )


async def test_a_chat_goes_on_and_a_completion_needs_none(open_page: OpenPage) -> None:
    async with bundled("tiny-chat") as url, open_page(url) as page:
        assert "tiny-chat" in str(await page.locator("#model").text_content())
        await ask(page, "What is 17 + 25?", temperature="0", other='{"logprobs": true}')
        text, figures = await answered(page)
        assert text == "17 + 25 = 42"
        for figure in ("end: stop", "first token: ", "tokens: ", "prompt: ", " tokens/s"):
            assert figure in figures
        # Each token has the colour of its probability.
        spans: list[list[str]] = await page.locator(".final span").evaluate_all(
            "all => all.map(each => [each.className, each.title, each.textContent])"
        )
        assert "".join(text for *_, text in spans) == text
        for name, title, _ in spans:
            assert name == f"p{min(4, int(float(title.split()[0]) / 20))}"
        await ask(page, "What is 17 + 25?", other='{"response_format": {"type": "json_object"}')
        assert "not JSON" in str(await page.locator("#status").text_content())
        await ask(page, "What is 17 + 25?", other="")
        await answered(page, 2)
        await page.select_option("#mode", "completions")
        await ask(page, "Once upon", max_tokens="2")
        assert "end: length" in (await answered(page, 3))[1]
        await page.click("#clear")
        assert await page.locator(".turn").count() == 0


async def test_text_appears_before_the_end_and_escape_stops_it(
    serving: Serving, gate: Gate, open_page: OpenPage
) -> None:
    async with serving(fault=gate) as served, open_page(served.url) as page:
        await ask(page, "ab", temperature="0", max_tokens="3000")
        gate.step(6)
        await page.wait_for_function("() => document.querySelector('.final')?.textContent")
        await wait_for_tile(page, "Running", "1")
        assert await page.locator("#send").is_disabled()
        await page.keyboard.press("Escape")
        assert "end: stopped" in (await answered(page))[1]
        gate.release()
        await until(lambda: idle(served))
        await wait_for_tile(page, "Running", "0")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FREE = {"diffusion": {"threshold": 0.9999}}
UNDER_SCHEMA = FREE | {
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
}


@pytest.mark.parametrize(
    ("prompt", "other", "answer"),
    [
        (STORY, FREE, "Once there was a child called Mara"),
        ("Who is it? Tom is 31 and lives in Rome.", UNDER_SCHEMA, '{"name": "Tom", "age": 31}'),
    ],
    ids=["free", "schema"],
)
async def test_drafts_of_blocks_are_shown_as_they_fill(
    open_page: OpenPage, prompt: str, other: dict[str, Any], answer: str
) -> None:
    async with bundled("tiny-diffusion", max_rounds=1) as url, open_page(url) as page:
        await page.evaluate(
            """() => {
              window.drafts = new Set();
              new MutationObserver(() => window.drafts.add(document.querySelector('.draft')?.textContent))
                .observe(document.querySelector('#log'), {subtree: true, childList: true});
            }"""
        )
        await ask(page, prompt, temperature="0", other=json.dumps(other))
        text, _ = await answered(page)
        assert text.startswith(answer)
        assert len([each for each in await page.evaluate("[...window.drafts]") if "\u2591" in each]) >= 3
        assert await page.locator(".draft").text_content() == ""


async def test_what_a_model_writes_is_text_and_nothing_else(serving: Serving, open_page: OpenPage) -> None:
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"content": evil}}]}]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks) + "data: [DONE]\n\n"
    async with serving() as served, open_page(served.url, refusals=True) as page:
        await page.route(
            "**/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        await ask(page, evil)
        assert (await answered(page))[0] == evil
        assert await page.locator("#log img, #log script").count() == 0
        assert await page.title() == "aioinfer playground"
        await page.unroute("**/chat/completions")
        await page.route("**/chat/completions", lambda route: route.abort())
        await ask(page, "ab")
        await answered(page, 2)
        assert await page.locator(".failure").text_content() == "The server cannot be reached."


async def test_the_key_is_kept_in_the_tab_and_refusals_are_shown(
    serving: Serving, open_page: OpenPage
) -> None:
    async with serving(server={"api_key": "secret"}) as served, open_page(served.url, refusals=True) as page:
        assert "key is missing" in str(await page.locator("#model").text_content())
        await page.fill("#key", "secret")
        await page.press("#key", "Tab")
        await page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('toy')")
        await wait_for_tile(page, "Running", "0")
        assert await page.evaluate("[Object.keys(localStorage), document.cookie]") == [[], ""]
        assert await page.evaluate("Object.values(sessionStorage)") == ["secret"]
        await ask(page, "ab", temperature="-1")
        await answered(page)
        assert "temperature" in str(await page.locator(".failure").text_content())
        assert await page.input_value("#prompt") == "ab"


async def test_the_timeline_moves_pauses_and_is_off_while_closed(open_page: OpenPage) -> None:
    drawn = "document.querySelector('#canvas').toDataURL()"
    async with bundled("tiny-chat") as url, open_page(url) as page:
        await wait_for_tile(page, "Running", "0")
        rest = await page.evaluate(drawn)
        await ask(page, STORY, temperature="0")
        await answered(page)
        await page.wait_for_function(
            "() => /^[1-9]\\d* steps in .* device [1-9]/.test(document.querySelector('#summary').textContent)"
        )
        assert await page.evaluate(drawn) != rest
        await page.click("#pause")
        before = await page.evaluate(drawn)
        assert await page.evaluate(drawn) == before
        await page.focus("#span")
        await page.keyboard.press("ArrowLeft")
        assert await page.evaluate(drawn) != before
        async with page.expect_event("requestfailed", lambda request: "steps" in request.url):
            await page.click("#engine summary")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
async def test_axe_finds_no_fault_and_nothing_is_too_wide(
    open_page: OpenPage, width: int, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="needs axe-playwright-python")
    options = {"width": width, "color_scheme": scheme, "reduced_motion": "reduce"}
    async with bundled("tiny-chat") as url, open_page(url, **options) as page:
        await ask(page, "x" * 300, temperature="0", max_tokens="20", other='{"logprobs": true}')
        await answered(page)
        await page.locator("#watch").evaluate("each => { each.open = true }")
        await wait_for_tile(page, "Running", "0")
        found = (await axe.Axe().run(page)).response["violations"]
        assert [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found] == []
        assert not await page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
