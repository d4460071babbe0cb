"""Images in the playground, in Chromium: picked, dropped and pasted, taken away, kept in the conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.test_playground_page import OpenPage, answered, ask
from tests.browser.test_playground_page import browser as browser
from tests.browser.test_playground_page import open_page as open_page
from tests.server.pictures import encoded, picture, seeing
from tests.tiers import PROGRAM

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [pytest.mark.nightly(PROGRAM), pytest.mark.asyncio(loop_factories=["uvloop"])]

#: an event with a file of these bytes in base64, as of a hand that drops or pastes it
TRANSFER = """([target, kind, data, name, type]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, { ...options, clipboardData: transfer })
    : new DragEvent(kind, { ...options, dataTransfer: transfer });
  document.querySelector(target).dispatchEvent(event);
}"""


async def give(page: Page, kind: str, data: bytes, name: str, media: str = "image/png") -> None:
    """Drop or paste a file."""
    await page.evaluate(TRANSFER, ["#prompt", kind, encoded(data), name, media])


async def shown(page: Page, count: int, where: str = "#images") -> list[str]:
    """The names of so many images."""
    await page.wait_for_function(
        "([where, count]) => document.querySelectorAll(`${where} img`).length === count", arg=[where, count]
    )
    names: list[str] = await page.locator(f"{where} img").evaluate_all("all => all.map(each => each.alt)")
    widths = await page.locator(f"{where} img").evaluate_all("all => all.map(each => each.naturalWidth)")
    assert all(widths)
    return names


async def test_images_are_picked_dropped_and_pasted_and_go_with_the_message(open_page: OpenPage) -> None:
    red, blue = picture("red", (64, 48)), picture("blue", (64, 48), "JPEG")
    async with seeing() as served, open_page(served.url) as page:
        requests = served.engine.requests  # type: ignore[attr-defined]
        async with page.expect_file_chooser() as chosen:
            await page.click("#attach")
        files: Any = [{"name": "red.png", "mimeType": "image/png", "buffer": red}]
        await (await chosen.value).set_files(files)
        await shown(page, 1)
        await give(page, "drop", blue, "blue.jpg", "image/jpeg")
        await shown(page, 2)
        await give(page, "paste", red, "pasted.png")
        assert await shown(page, 3) == ["red.png", "blue.jpg", "pasted.png"]
        await page.get_by_role("button", name="Remove blue.jpg").click()
        assert await shown(page, 2) == ["red.png", "pasted.png"]
        await ask(page, "What is it?")
        assert (await answered(page))[0] == "Seen."
        assert requests[-1].prompt == "user: <image><image>What is it?\nassistant: "
        # They are in the conversation, on the page and in what is sent next.
        assert await shown(page, 0) == []
        assert await shown(page, 2, ".user") == ["red.png", "pasted.png"]
        await give(page, "drop", blue, "blue.jpg", "image/jpeg")
        await shown(page, 1)
        await ask(page, "")
        await answered(page, 2)
        before = "user: <image><image>What is it?\nassistant: Seen."
        assert requests[-1].prompt == f"{before}\nuser: <image>\nassistant: "
        await page.click("#clear")
        assert await shown(page, 0, "main") == []


async def test_what_is_no_image_and_a_model_that_reads_none_are_told(open_page: OpenPage) -> None:
    red = picture("red")
    async with seeing() as served, open_page(served.url, refusals=True) as page:
        await give(page, "drop", b"text", "a.txt", "text/plain")
        await page.wait_for_function(
            "() => document.querySelector('#status').textContent.startsWith('a.txt is no')"
        )
        await give(page, "drop", red[:40], "cut.png")
        await page.wait_for_function("() => document.querySelectorAll('#images img').length === 1")
        await ask(page, "What?")
        await answered(page)
        assert "cannot be decoded" in str(await page.locator(".failure").text_content())
        # What was not answered is there again.
        assert await page.locator("#images img").count() == 1
        assert await page.input_value("#prompt") == "What?"
        await page.select_option("#mode", "completions")
        assert await page.locator("#attach").is_disabled()
        await page.press("#prompt", "Control+Enter")
        assert await page.locator("#status").text_content() == "Images belong to chats."
    async with seeing(images=False) as served, open_page(served.url) as page:
        assert await page.locator("#attach").is_disabled()
        assert await page.locator("#attach").get_attribute("title") == "This model reads no images."
        await give(page, "drop", red, "red.png")
        assert await page.locator("#status").text_content() == "This model reads no images."
        assert await page.locator("#images img").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
async def test_axe_finds_no_fault_in_images(open_page: OpenPage, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="needs axe-playwright-python")
    async with seeing() as served, open_page(served.url, width=width, color_scheme=scheme) as page:
        for number in range(4):
            await give(page, "drop", picture("red", (640, 480)), f"{number}.png")
            await shown(page, number + 1)
        await ask(page, "What is it?")
        await answered(page)
        await give(page, "drop", picture("blue", (64, 480)), "blue.png")
        await shown(page, 1)
        found = (await axe.Axe().run(page)).response["violations"]
        assert [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found] == []
        assert not await page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
