"""The playground in Chromium: what a reader sees and does, with a mouse and without, on any screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import OpenPage, ServeBundled
from tests.engine.conftest import Gate
from tests.server.conftest import Serving
from tests.server.test_adversity import idle, until
from tests.tiers import PROGRAM

if TYPE_CHECKING:
    from playwright.async_api import Page

#: One loop: the browser is another process, which sees no difference.
pytestmark = [pytest.mark.nightly(PROGRAM), pytest.mark.asyncio(loop_factories=["uvloop"])]

STORY = "Tell me a long story about Mara."
HELD = ("arriving", "waiting", "running")
LAST = ".pane:not([hidden]) .model-turn:last-child"


async def ask(page: Page, text: str, **fields: str) -> None:
    """Set parameters of the first pane, write a message, and send it without the mouse."""
    for name, value in fields.items():
        await set_field(page, name, value)
    await page.fill("#prompt", text)
    await page.press("#prompt", "Control+Enter")


async def set_field(page: Page, name: str, value: str, pane: int = 0) -> None:
    await page.locator(".parameters").nth(pane).evaluate("each => { each.open = true }")
    await page.locator(f"[name={name}]").nth(pane).fill(value)


async def answered(page: Page, count: int = 1) -> list[dict[str, str]]:
    """The figures of the last answers of this many panes, when all of them have ended."""
    await page.wait_for_function(
        "([path, count]) => [...document.querySelectorAll(path)].filter("
        "each => each.getAttribute('aria-busy') === 'false').length === count",
        arg=[LAST, count],
    )
    found: list[dict[str, str]] = await page.locator(LAST).evaluate_all(
        "all => all.map(turn => Object.fromEntries([...turn.querySelectorAll('.figures div')].map("
        "pair => [pair.children[0].textContent, pair.children[1].textContent])))"
    )
    return found


async def text_of(page: Page, pane: int = 0) -> str:
    return str(await page.locator(LAST).nth(pane).locator(".final").text_content())


async def wait_for_text(page: Page, pane: int = 0) -> None:
    await page.wait_for_function(
        "([path, pane]) => document.querySelectorAll(path)[pane]?.querySelector('.final').textContent",
        arg=[LAST, pane],
    )


async def gauge(page: Page, name: str, value: str) -> None:
    """Wait until a gauge has a value."""
    await page.wait_for_function(
        "([name, value]) => document.querySelector(`[data-gauge=${name}] .value`).textContent === value",
        arg=[name, value],
    )


# -- chats ---------------------------------------------------------------------------------------------


async def test_text_appears_before_the_end_and_escape_stops_the_answer(
    serving: Serving, gate: Gate, open_page: OpenPage
) -> None:
    async with serving(fault=gate) as served, open_page(served.url) as page:
        await ask(page, "ab", temperature="0", max_tokens="3000")
        gate.step(6)
        await wait_for_text(page)
        turn = page.locator(LAST)
        assert await turn.get_attribute("aria-busy") == "true"
        assert not await turn.locator(".figures").count()
        await gauge(page, "running", "1")
        assert await page.locator("#stop").is_enabled()
        assert await page.locator("#send").is_disabled()
        partial = await text_of(page)
        await page.keyboard.press("Escape")
        (figures,) = await answered(page)
        assert figures["end"] == "stopped"
        assert (await text_of(page)).startswith(partial)
        assert await page.locator("#status").text_content() == "Answer stopped."
        gate.release()
        await until(lambda: idle(served))
        await gauge(page, "running", "0")
        assert await page.locator("#prompt").evaluate("each => each === document.activeElement")


async def test_two_panes_stream_at_the_same_time_with_their_own_parameters(
    serving: Serving, gate: Gate, open_page: OpenPage
) -> None:
    async with serving(fault=gate) as served, open_page(served.url) as page:
        await set_field(page, "temperature", "0")
        await page.click("#compare")
        await set_field(page, "max_tokens", "6", 0)
        await set_field(page, "max_tokens", "11", 1)
        await set_field(page, "system", "Be brief.", 1)
        assert await page.locator(".chosen").nth(1).text_content() == (
            "system prompt, temperature 0, max_tokens 11"
        )
        await ask(page, "ab")
        await until(lambda: sum(map(served.engine.stats().__getattribute__, HELD)) == 2)
        gate.step(4)
        await wait_for_text(page, 0)
        await wait_for_text(page, 1)
        assert await page.locator(f"{LAST}[aria-busy=true]").count() == 2
        gate.release()
        first, second = await answered(page, 2)
        assert (first["tokens"], second["tokens"]) == ("6", "11")
        assert (first["end"], second["end"]) == ("length", "length")


async def test_a_chat_with_the_bundled_model(serve_bundled: ServeBundled, open_page: OpenPage) -> None:
    async with serve_bundled("tiny-chat") as url, open_page(url) as page:
        assert "tiny-chat" in str(await page.locator("#model").text_content())
        await ask(page, "What is 17 + 25?", temperature="0")
        (figures,) = await answered(page)
        assert await text_of(page) == "17 + 25 = 42"
        assert figures["end"] == "stop"
        assert {"first token", "speed", "tokens", "prompt"} <= figures.keys()
        # The conversation goes on.
        await ask(page, "What is 17 + 25?")
        await page.wait_for_function("() => document.querySelectorAll('.figures').length === 2")
        await page.click("#clear")
        assert await page.locator(".turn").count() == 0


async def test_tokens_are_coloured_by_probability(serve_bundled: ServeBundled, open_page: OpenPage) -> None:
    async with serve_bundled("tiny-chat") as url, open_page(url) as page:
        await page.locator(".parameters").evaluate("each => { each.open = true }")
        await page.check("[name=logprobs]")
        await ask(page, "What is 17 + 25?", temperature="0")
        await answered(page)
        spans: list[list[str]] = await page.locator(".final span").evaluate_all(
            "all => all.map(each => [each.className, each.title, each.textContent])"
        )
        assert "".join(text for *_, text in spans) == "17 + 25 = 42"
        for name, title, _ in spans:
            assert name == f"p{min(4, int(float(title.split()[0]) / 20))}"


async def test_drafts_animate_and_become_the_answer(serve_bundled: ServeBundled, open_page: OpenPage) -> None:
    # Each round is a step of its own, which the host sees.
    async with serve_bundled("tiny-diffusion", {"max_rounds": 1}) as url, open_page(url) as page:
        await page.evaluate(
            """() => {
              window.drafts = [];
              new MutationObserver(() => {
                const draft = document.querySelector('.draft');
                const unknown = draft?.querySelector('.unknown');
                if (unknown) window.drafts.push([draft.textContent, unknown.getAnimations().length]);
              }).observe(document.querySelector('#panes'), {subtree: true, childList: true});
            }"""
        )
        await ask(page, STORY, temperature="0", threshold="0.9999")
        (figures,) = await answered(page)
        text = await text_of(page)
        assert text.startswith("Once there was a child called Mara")
        assert figures["end"] == "stop"
        assert await page.locator(".draft").text_content() == ""
        drafts: list[tuple[str, int]] = await page.evaluate("window.drafts")
        assert len({draft for draft, _ in drafts}) >= 3
        assert all(animations == 1 for _, animations in drafts)
        known = [draft.replace("\u2591", "") for draft, _ in drafts]
        assert any(part.strip() and part.strip() in text for part in known)


# -- what models and servers may say -------------------------------------------------------------------


async def test_what_a_model_writes_is_text_and_code_and_nothing_else(
    serving: Serving, open_page: OpenPage
) -> None:
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    pieces = [evil, "\n``", "`html\n", evil, "\n`", "``\nafter ``` it"]
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks) + "data: [DONE]\n\n"
    async with serving() as served, open_page(served.url) as page:
        await page.route(
            "**/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        await ask(page, evil)
        await answered(page)
        assert await page.locator(".turn img, .turn script").count() == 0
        assert await page.locator(".turn pre code").text_content() == f"{evil}\n"
        assert await text_of(page) == f"{evil}\n{evil}\nafter ``` it"
        assert await page.title() == "aioinfer playground"


async def test_streams_are_read_the_same_however_they_are_cut(serving: Serving, open_page: OpenPage) -> None:
    events = ": ok\n\ndata: a\ndata:b\n\n: ping\n\ndata: {}\r\n\r\nevent: x\ndata: [DONE]\n\ndata: open"
    text = "`a`\n```py\nx = `1`\n  ```\n```\nend ```\n``"
    parts = [["text", "`a`\n"], ["code", "x = `1`\n  ```\n"], ["text", "end ```\n``"]]
    async with serving() as served, open_page(served.url) as page:
        found: list[Any] = await page.evaluate(
            """async ([events, text]) => {
              const {EventParser} = await import('/playground/stream.js');
              const {Fences} = await import('/playground/text.js');
              const cuts = (whole) => [...Array(whole.length + 1).keys()].flatMap(
                (cut) => [1, 2, 5].map((size) => [
                  whole.slice(0, cut), ...(whole.slice(cut).match(RegExp(`[^]{1,${size}}`, 'g')) ?? []),
                ]));
              const read = cuts(events).map((pieces) => {
                const parser = new EventParser();
                return pieces.flatMap((piece) => parser.push(piece));
              });
              const written = cuts(text).map((pieces) => {
                const fences = new Fences(), joined = [];
                for (const part of [...pieces.flatMap((each) => fences.push(each)), ...fences.finish()]) {
                  if (!part.text) continue;
                  if (joined.at(-1)?.[0] === part.kind) joined.at(-1)[1] += part.text;
                  else joined.push([part.kind, part.text]);
                }
                return joined;
              });
              const distinct = (all) => [...new Set(all.map((each) => JSON.stringify(each)))];
              return [distinct(read), distinct(written)];
            }""",
            [events, text],
        )
    assert [json.loads(each) for each in found[0]] == [["a\nb", "{}", "[DONE]"]]
    assert [json.loads(each) for each in found[1]] == [parts]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schema", "{", "This is not JSON"),
        ("schema", "[1]", "A schema is a JSON object."),
        ("schema", '{"type": "nothing"}', "nothing"),
        ("temperature", "-1", "temperature"),
        ("top_p", "7", "top_p"),
        ("seed", "0.5", "integer"),
    ],
)
async def test_an_error_is_shown_at_its_field(
    serve_bundled: ServeBundled, open_page: OpenPage, field: str, value: str, message: str
) -> None:
    async with serve_bundled("tiny-chat") as url, open_page(url, refusals=True) as page:
        await ask(page, "Hello!", **{field: value})
        error = page.locator(".field-error")
        await error.wait_for()
        assert message in str(await error.text_content())
        named = page.locator(f"[name={field}]")
        assert await named.get_attribute("aria-invalid") == "true"
        assert await named.get_attribute("aria-describedby") == await error.get_attribute("id")
        # The message is there to be sent again.
        await page.wait_for_function("() => document.querySelector('#prompt').value === 'Hello!'")
        await ask(page, "Hello!", **{field: "" if field != "schema" else '{"enum": ["yes"]}'})
        await page.wait_for_function(
            f"() => document.querySelector('{LAST}')?.querySelector('.final').textContent"
        )
        await answered(page)
        assert not await error.count()
        if field == "schema":
            assert await text_of(page) == '"yes"'


async def test_the_key_is_asked_for_and_kept_in_the_tab(serving: Serving, open_page: OpenPage) -> None:
    async with serving(server={"api_key": "secret"}) as served, open_page(served.url, refusals=True) as page:
        assert "key is missing" in str(await page.locator("#model").text_content())
        await page.wait_for_selector("#key", state="visible")
        await page.fill("#key", "wrong")
        await page.press("#key", "Tab")
        await page.wait_for_function("() => document.querySelector('#model').textContent === 'wrong API key'")
        await page.fill("#key", "secret")
        await page.press("#key", "Tab")
        await page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('toy')")
        await gauge(page, "running", "0")
        await page.keyboard.press("Escape")
        await ask(page, "ab", max_tokens="4")
        (figures,) = await answered(page)
        assert figures["end"] in ("length", "stop")
        assert await page.evaluate("[Object.keys(localStorage), document.cookie]") == [[], ""]
        assert await page.evaluate("Object.values(sessionStorage)") == ["secret"]


async def test_a_server_that_is_gone_is_said(serving: Serving, open_page: OpenPage) -> None:
    async with serving() as served, open_page(served.url, refusals=True) as page:
        await page.route("**/chat/completions", lambda route: route.abort())
        await ask(page, "ab")
        await answered(page)
        assert await page.locator(".failure").text_content() == "The server cannot be reached."


# -- the engine ----------------------------------------------------------------------------------------


async def test_gauges_and_timeline_show_the_work(serve_bundled: ServeBundled, open_page: OpenPage) -> None:
    async with serve_bundled("tiny-chat") as url, open_page(url) as page:
        await gauge(page, "running", "0")
        await ask(page, STORY, temperature="0")
        await answered(page)
        await page.wait_for_function(
            "() => /^[1-9]\\d* steps in .* device [1-9]/.test("
            "document.querySelector('#timeline-summary').textContent)"
        )
        await gauge(page, "hits", "0 %")
        await page.click("#pause")
        assert await page.locator("#position").is_enabled()
        drawn = "document.querySelector('#canvas').toDataURL()"
        before = await page.evaluate(drawn)
        assert (
            await page.evaluate(
                """() => {
              const canvas = document.querySelector('#canvas');
              const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
              return new Set(new Uint32Array(data.buffer)).size;
            }"""
            )
            > 4
        )
        await page.focus("#span")
        await page.keyboard.press("ArrowLeft")
        assert await page.evaluate(drawn) != before
        box = await page.locator("#canvas").bounding_box()
        assert box is not None
        # A second question finds the first one's prefix.
        await page.click("#clear")
        await ask(page, STORY)
        await answered(page)
        await page.wait_for_function(
            "() => document.querySelector('[data-gauge=hits] .value').textContent !== '0 %'"
        )


async def test_nobody_watches_when_the_section_is_closed(serving: Serving, open_page: OpenPage) -> None:
    async with serving() as served, open_page(served.url) as page:
        feeds: list[str] = []
        page.on("request", lambda request: feeds.append(request.url) if "steps" in request.url else None)
        async with page.expect_event("requestfailed", lambda request: "steps" in request.url):
            await page.click("#engine summary")
        await page.click("#engine summary")
        await page.wait_for_function("() => document.querySelector('#engine-details').open")
        await until(lambda: len(feeds) == 1)


# -- every reader --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("model", ["tiny-chat", "tiny-diffusion"])
async def test_axe_finds_no_fault(
    serve_bundled: ServeBundled, open_page: OpenPage, model: str, width: int, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="needs axe-playwright-python")
    async with serve_bundled(model) as url, open_page(url, width=width, color_scheme=scheme) as page:
        faults = [await faults_of(axe, page)]
        await page.click("#compare")
        await ask(page, STORY, temperature="0", max_tokens="30")
        await set_field(page, "schema", "{", 1)
        await answered(page, 2)
        await page.fill("#prompt", "again")
        await page.press("#prompt", "Control+Enter")
        await page.wait_for_selector(".field-error")
        await page.locator("#engine-details").evaluate("each => { each.open = true }")
        await gauge(page, "running", "0")
        await page.locator("#access").evaluate("each => { each.open = true }")
        faults.append(await faults_of(axe, page))
        assert faults == [[], []]


async def faults_of(axe: Any, page: Page) -> list[str]:
    found = (await axe.Axe().run(page)).response["violations"]
    return [f"{each['id']} ({each['impact']}): {each['nodes'][0]['html'][:200]}" for each in found]


async def test_a_phone_scrolls_in_one_direction(serve_bundled: ServeBundled, open_page: OpenPage) -> None:
    async with serve_bundled("tiny-chat") as url, open_page(url, width=360, height=700) as page:
        wide = "document.documentElement.scrollWidth > window.innerWidth"
        assert not await page.locator("#engine-details").evaluate("each => each.open")
        assert not await page.evaluate(wide)
        await page.click("#compare")
        await ask(page, "x" * 300, temperature="0", max_tokens="20")
        await set_field(page, "system", "y" * 300, 1)
        await answered(page, 2)
        await page.locator("#engine-details").evaluate("each => { each.open = true }")
        await page.locator("#access").evaluate("each => { each.open = true }")
        await gauge(page, "running", "0")
        assert not await page.evaluate(wide)
        small = await page.locator("button:visible, summary:visible").evaluate_all(
            "all => all.filter(each => each.getBoundingClientRect().height < 30).map(each => each.outerHTML)"
        )
        assert small == []


async def test_everything_is_reached_by_the_keyboard(serving: Serving, open_page: OpenPage) -> None:
    async with serving() as served, open_page(served.url) as page:
        await page.locator(".parameters").evaluate("each => { each.open = true }")
        await page.evaluate("document.activeElement.blur(); window.getSelection().removeAllRanges()")
        await page.focus(".skip")
        reached = []
        for _ in range(40):
            found: list[str] = await page.evaluate(
                """() => {
                  const each = document.activeElement, style = getComputedStyle(each);
                  const name = each.id || each.name || each.className || each.parentElement.id;
                  return [name || each.tagName, style.outlineStyle];
                }"""
            )
            if found[0] == "BODY" or found in reached:
                break
            reached.append(found)
            await page.keyboard.press("Tab")
        names = [name for name, _ in reached]
        expected = ["skip", "compare", "clear", "access", "system", "temperature", "top_p", "max_tokens"]
        expected += ["seed", "stop", "schema", "logprobs", "log", "prompt", "send", "pause", "span"]
        assert [name for name in names if name in expected] == expected
        assert [name for name, style in reached if style == "none"] == []
        await page.focus(".skip")
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "prompt"


async def test_without_motion_nothing_moves(serve_bundled: ServeBundled, open_page: OpenPage) -> None:
    async with (
        serve_bundled("tiny-diffusion") as url,
        open_page(url, reduced_motion="reduce") as page,
    ):
        await page.evaluate(
            """() => {
              window.moving = 0;
              new MutationObserver(() => (window.moving += document.getAnimations().length))
                .observe(document.querySelector('#panes'), {subtree: true, childList: true});
            }"""
        )
        await ask(page, STORY, temperature="0")
        await answered(page)
        assert await page.evaluate("window.moving + document.getAnimations().length") == 0
        await page.wait_for_function(
            "() => /^[1-9]/.test(document.querySelector('#timeline-summary').textContent)"
        )


async def test_screenshots_are_of_this_page() -> None:
    """Small files that the documentation shows; ``python -m tests.browser.screenshots`` makes them anew."""
    found = sorted((Path(__file__).parents[2] / "docs").glob("playground-*.png"))
    assert len(found) == 4
    for each in found:
        assert each.read_bytes().startswith(b"\x89PNG")
        assert each.stat().st_size < 200_000
