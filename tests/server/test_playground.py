"""The playground: its page is safe and its own server's only, and its feed bounded, guarded and closed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
import pytest
from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.observe.feed import GAUGES, StepFeed
from aioinfer.params import SamplingParams
from aioinfer.server import create_app, setup
from aioinfer.server.watching import _IDLE_INTERVAL, _INTERVAL, _MOST_CLIENTS, Watching
from tests.engine.simulation import settle
from tests.server.conftest import Connect, Serving
from tests.server.raw import request
from tests.server.test_adversity import until
from tests.server.test_mounting import make_engine, running
from tests.tiers import SECONDS, rest

WORK = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


async def get(session: aiohttp.ClientSession, url: str, **headers: str) -> tuple[aiohttp.ClientResponse, str]:
    async with session.get(url, headers={k.replace("_", "-"): v for k, v in headers.items()}) as response:
        return response, await response.text()


async def files(session: aiohttp.ClientSession, page: str) -> dict[str, str]:
    """The page, the files that it names, and those that these import, by URL."""
    found: dict[str, str] = {}
    waiting = [page]
    while waiting:
        url = waiting.pop()
        response, text = await get(session, url)
        assert response.status == 200, url
        kind = "text/html" if url == page else TYPES[url.rsplit(".", 1)[1]]
        assert (response.content_type, response.charset) == (kind, "utf-8")
        check_headers(response)
        found[url] = text
        pattern = r'(?:src|href)="([^"#]+)"' if url == page else r'from "([^"]+)"'
        named = [urljoin(url, link) for link in re.findall(pattern, text)]
        waiting += [link for link in named if link not in found and link not in waiting]
    return found


def check_headers(response: aiohttp.ClientResponse) -> None:
    policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy)
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"


# -- the page ------------------------------------------------------------------------------------------


async def test_the_page_and_its_files_need_no_key(serving: Serving) -> None:
    async with serving(server={"api_key": "secret"}) as served, aiohttp.ClientSession() as session:
        found = await files(session, f"{served.url}/")
        names = {urlsplit(url).path for url in found}
        assert {"/", "/playground/style.css", "/playground/main.js", "/playground/stream.js"} <= names
        response, _ = await get(session, f"{served.url}/v1/models")
        assert response.status == 401


async def test_nothing_of_the_page_is_inline_or_from_elsewhere(serving: Serving) -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        found = await files(session, f"{served.url}/")
    for url, text in found.items():
        assert url.startswith(served.url)
        for elsewhere in re.findall(r"https?://[^\s\"')]+", text):
            assert elsewhere == "http://www.w3.org/2000/svg"  # the name of a format, which nothing loads
        assert not re.search(r"@import|url\(", text) or not url.endswith(".css")
        # Texts of models become text nodes, and keys are kept in the tab only.
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser"):
            assert banned not in text, (url, banned)
        for banned in ("eval(", "new Function", "localStorage", "indexedDB", "document.cookie"):
            assert banned not in text, (url, banned)
    html = found[f"{served.url}/"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]* src=)", html)
    assert "{{" not in html


async def test_a_file_that_is_known_is_not_sent_again(serving: Serving) -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        for path in ("/", "/playground/main.js"):
            response, text = await get(session, served.url + path)
            assert text
            tag = response.headers["ETag"]
            response, text = await get(session, served.url + path, If_None_Match=tag)
            assert (response.status, text) == (304, "")
            response, text = await get(session, served.url + path, If_None_Match='"other"')
            assert response.status == 200


@pytest.mark.parametrize(
    "path", ["/playground", "/playground/", "/playground/page.py", "/playground/%2e%2e/app.py"]
)
async def test_only_its_files_are_served(serving: Serving, path: str) -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        response, _ = await get(session, f"{served.url}/playground{path}")
        assert response.status == 404


async def test_a_page_of_another_name_does_not_reach_it(serving: Serving) -> None:
    """DNS rebinding."""
    async with serving() as served, aiohttp.ClientSession() as session:
        for path in ("/", "/debug/steps"):
            response, text = await get(session, served.url + path, Host="evil.example")
            assert response.status == 403
            assert json.loads(text)["error"]["code"] == "host_not_allowed"


async def test_it_can_be_turned_off(serving: Serving) -> None:
    async with serving(server={"playground": False}) as served, aiohttp.ClientSession() as session:
        for path in ("/", "/playground/main.js"):
            response, _ = await get(session, served.url + path)
            assert response.status == 404
    app = create_app(make_engine(), ServerConfig(playground=False))
    assert "/" not in {resource.canonical for resource in app.router.resources()}


async def test_an_application_has_it_only_where_it_asks() -> None:
    app = web.Application()
    setup(app, make_engine(), prefix="/a/v1")
    assert not [each for each in app.router.resources() if "playground" in each.canonical]
    setup(app, make_engine(), prefix="/b/v1", playground="/b/try")
    setup(app, make_engine(), prefix="/c/v1", playground="/c/")
    async with running(app) as url, aiohttp.ClientSession() as session:
        for page in ("/b/try", "/c/"):
            found = await files(session, url + page)
            assert len(found) > 5
            html = found[url + page]
            for name, path in (("api", "models"), ("steps", "")):
                (link,) = re.findall(f'data-{name}="([^"]*)"', html)
                there = urljoin(url + page, f"{link}/{path}".rstrip("/"))
                assert urlsplit(there).path.startswith(page[:3])
                async with session.get(there) as response:
                    assert response.status == 200


async def test_its_links_lead_to_its_own_server_behind_another_path() -> None:
    """In an application within another one, or behind a proxy."""
    app = web.Application()
    setup(app, make_engine(), playground="/")
    outer = web.Application()
    outer.add_subapp("/llm/", app)
    async with running(outer) as url, aiohttp.ClientSession() as session:
        found = await files(session, f"{url}/llm/")
        assert len(found) > 5
        assert {urlsplit(link).path.split("/")[1] for link in found} == {"llm"}
        html = found[f"{url}/llm/"]
        assert 'data-api="v1"' in html
        assert 'data-steps="debug/steps"' in html


async def test_a_page_without_a_feed_says_so() -> None:
    app = web.Application()
    setup(app, make_engine(), health=None, playground="/")
    async with running(app) as url, aiohttp.ClientSession() as session:
        _, html = await get(session, url)
        assert 'data-steps=""' in html
        response, _ = await get(session, f"{url}/debug/steps")
        assert response.status == 404


def test_a_path_that_is_none_or_taken_is_refused() -> None:
    app = web.Application()
    with pytest.raises(ConfigError, match="playground must begin with /"):
        setup(app, make_engine(), playground="try")
    app = create_app(make_engine())
    with pytest.raises(ConfigError, match="already has the route /"):
        setup(app, make_engine(), prefix="/b/v1", playground="/")


async def test_the_model_says_whether_it_writes_in_blocks(serving: Serving) -> None:
    from tests.toys.blocks import ScriptedDevice

    async with aiohttp.ClientSession() as session:
        async with serving() as served:
            _, text = await get(session, f"{served.url}/v1/models")
            assert "block_size" not in json.loads(text)["data"][0]
        device = ScriptedDevice(num_slots=512, num_pages=512)
        async with serving(device=device) as served:
            _, text = await get(session, f"{served.url}/v1/models/toy")
            assert json.loads(text)["block_size"] == served.engine.info.block_size > 1


# -- the feed ------------------------------------------------------------------------------------------


class Feed:
    """A client that watches."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        #: the feed has ended, and said so
        self.done = False

    async def frame(self) -> dict[str, Any] | None:
        """The next frame; None at the end."""
        async for line in self.response.content:
            if line == b"data: [DONE]\n":
                self.done = True
            elif line.startswith(b"data: "):
                frame: dict[str, Any] = json.loads(line[6:])
                return frame
        return None

    async def frames(self, enough: int) -> list[dict[str, Any]]:
        """Frames up to the one that says that so many requests have finished and nothing is in flight."""
        found = []
        while (frame := await self.frame()) is not None:
            found.append(frame)
            if frame["stats"]["finished"] >= enough and not frame["stats"]["steps_in_flight"]:
                break
        return found


@asynccontextmanager
async def watch(url: str, **headers: str) -> AsyncIterator[Feed]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/debug/steps", headers=headers) as response,
    ):
        yield Feed(response)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Watching]:
    """The feeds of all servers that start in the test."""
    found: list[Watching] = []
    original = Watching.__init__

    def noted(self: Watching, *arguments: Any) -> None:
        original(self, *arguments)
        found.append(self)

    monkeypatch.setattr(Watching, "__init__", noted)
    return found


async def test_the_steps_of_a_server_arrive_once_and_in_order(serving: Serving) -> None:
    async with serving() as served, watch(served.url) as feed:
        assert feed.response.content_type == "text/event-stream"
        first = await feed.frame()
        assert first is not None
        assert first["stats"]["finished"] == 0
        await served.engine.generate([1, 2], WORK)
        await settle(served.engine)
        frames = [first, *await feed.frames(1)]
        stats = served.engine.stats()
    assert all(frame["left_out"] == 0 for frame in frames)
    for lane in ("loop", "launch", "device"):
        events = [event for frame in frames for event in frame["lanes"][lane]]
        assert len({(name, step) for name, step, *_ in events}) == len(events), "an event came twice"
        assert {step for _, step, *_ in events} == set(range(1, stats.steps + 1))
        ends = [start + length for *_, start, length in events]
        assert all(a <= b + 1 for a, b in pairwise(ends))  # rounded
    times = [frame["t"] for frame in frames]
    assert times == sorted(times)
    last = frames[-1]["stats"]
    assert set(last) == set(GAUGES)
    assert (last["output_tokens"], last["state"], last["pages_private"]) == (20, "running", 0)


async def test_clients_get_the_same_frames_in_their_intervals(made: list[Watching], serving: Serving) -> None:
    async with serving() as served:
        (watching,) = made
        frame = watching._newest(1000.0)
        assert watching._newest(1000.0 + 0.9 * _INTERVAL) is frame
        # Nothing has happened: the same again until a second has passed.
        assert watching._newest(1000.0 + 5.5 * _INTERVAL) is frame
        later = watching._newest(1000.0 + _IDLE_INTERVAL + 0.5 * _INTERVAL)
        assert later is not frame
        await served.engine.generate([1, 2], WORK)
        await settle(served.engine)
        assert watching._newest(1000.0 + _IDLE_INTERVAL + 1.5 * _INTERVAL) is not later


async def test_nothing_is_computed_when_nobody_watches(
    serving: Serving, made: list[Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    original = StepFeed.frame

    def counted(self: StepFeed, *arguments: Any) -> tuple[str, bool]:
        computed.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(StepFeed, "frame", counted)
    async with serving() as served:
        tasks = asyncio.all_tasks()
        await served.engine.generate([1, 2], WORK)
        assert not computed
        async with watch(served.url) as feed:
            await feed.frame()
            assert computed
        await until(lambda: made[0].clients == 0)
        computed.clear()
        await served.engine.generate([1, 2], WORK)
        await until(lambda: len(asyncio.all_tasks()) <= len(tasks))
        assert not computed


@rest(SECONDS)
async def test_the_number_of_clients_is_bounded(serving: Serving, made: list[Watching]) -> None:
    async with serving() as served, AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(watch(served.url)) for _ in range(_MOST_CLIENTS)]
        for feed in feeds:
            assert await feed.frame() is not None
        async with watch(served.url) as refused:
            assert refused.response.status == 429
            assert refused.response.headers["Retry-After"] == "5"
            assert (await refused.response.json())["error"]["code"] == "too_many_clients"
        feeds[3].response.close()
        await until(lambda: made[0].clients < _MOST_CLIENTS)
        async with watch(served.url) as another:
            assert await another.frame() is not None
        # A refused client is not counted, and those that watch go on.
        assert await feeds[0].frame() is not None


@rest(SECONDS)
async def test_a_client_that_does_not_read_misses_frames_and_is_dropped(
    serving: Serving, connect: Connect, made: list[Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def large(*_: Any) -> tuple[str, bool]:
        computed.append(1)
        return "x" * 2_000_000 + str(len(computed)), True

    monkeypatch.setattr(StepFeed, "frame", large)
    async with serving(server={"send_timeout": 0.5}) as served:
        raw = await connect(served)
        await raw.send(request(path="/debug/steps"))
        await until(lambda: made[0].clients == 1)
        await until(lambda: made[0].clients == 0)
        # One frame filled the buffers of the connection, or a few: none was made to wait in a queue.
        assert len(computed) <= 8


async def test_a_head_of_the_feed_has_no_body(serving: Serving, connect: Connect) -> None:
    async with serving() as served, asyncio.timeout(60):
        raw = await connect(served)
        for path in ("/debug/steps", "/health"):  # what comes second begins where the first has ended
            await raw.send(request("HEAD", path))
            head = await raw.head()
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: application/json" in head


async def test_the_feed_requires_the_api_key(serving: Serving) -> None:
    async with serving(server={"api_key": "secret"}) as served:
        async with watch(served.url) as feed:
            assert feed.response.status == 401
        async with watch(served.url, Authorization="Bearer secret") as feed:
            assert await feed.frame() is not None


async def test_without_a_key_it_is_for_local_names_only() -> None:
    """Also in an application that checks no hosts itself."""
    app = web.Application()
    setup(app, make_engine())
    async with running(app) as url:
        async with watch(url, Host="evil.example") as feed:
            assert feed.response.status == 403
        async with watch(url, Origin="http://evil.example") as feed:
            assert feed.response.status == 403
        async with watch(url) as feed:
            assert await feed.frame() is not None


async def test_a_server_that_stops_ends_the_feed(serving: Serving) -> None:
    async with serving() as served, watch(served.url) as feed:
        assert await feed.frame() is not None
        served.stop.set()
        while await feed.frame() is not None:
            pass
        assert feed.done
        await served.task


async def test_an_application_that_shuts_down_ends_the_feed_of_an_engine_that_goes_on() -> None:
    app = web.Application()
    async with make_engine() as engine:
        setup(app, engine)
        async with running(app) as url, asyncio.timeout(60):
            feeding = watch(url)
            feed = await feeding.__aenter__()
            assert await feed.frame() is not None
        # ``running`` has returned: no handler was waited for until aiohttp's timeout of 60 seconds.
        while await feed.frame() is not None:
            pass
        assert feed.done
        await feeding.__aexit__(None, None, None)
        assert engine.ready


async def test_an_engine_that_does_not_serve_has_no_feed() -> None:
    app = web.Application()
    engine = make_engine()
    setup(app, engine)
    async with running(app) as url:
        await engine.aclose()
        async with watch(url) as feed:
            assert feed.response.status == 503
            assert feed.response.headers["Retry-After"] == "5"
