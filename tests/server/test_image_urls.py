"""Images that the server fetches: from the hosts of its list, at public addresses, within its limits."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest
from aioinfer.server import generation
from aioinfer.server.http.bodies import BODIES
from aioinfer.server.http.fetching import Fetcher, is_public
from tests.server.conftest import Served
from tests.server.pictures import claude, image_url, picture, seeing
from tests.server.test_adversity import idle, until
from tests.tiers import SECONDS, rest

RED = picture("red")


class Origin:
    """A host of images, and how often each path was asked for."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[str] = []
        self.headers: dict[str, str] = {}
        #: requests to /held, which wait
        self.held = self.most_held = 0
        self.release = asyncio.Event()
        self.gone = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str = "red.png") -> str:
        return f"http://{self.host}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/")
        self.asked.append(path)
        self.headers = dict(request.headers)
        if path.startswith("to/"):
            return web.Response(status=302, headers={"Location": request.query["url"]})
        if path.startswith("hops/"):
            left = int(path.removeprefix("hops/"))
            target = f"/hops/{left - 1}" if left else "/red.png"
            return web.Response(status=307, headers={"Location": target})
        if path.startswith("status/"):
            return web.Response(status=int(path.removeprefix("status/")), body=RED)
        if path == "held":
            return await self._hold()
        if path == "missing-behind-held":
            await until(lambda: self.held > 0)
            return web.Response(status=404)
        if path == "endless":
            return await self._endless(request)
        if path == "compressed":
            return web.Response(body=RED, headers={"Content-Encoding": "br"})
        if path == "cut":
            return await self._cut(request)
        bodies = {"text": b"hello", "empty": b"", "large": RED + bytes(21 << 20)}
        return web.Response(body=bodies.get(path, RED), content_type="application/octet-stream")

    async def _hold(self) -> web.Response:
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.held -= 1
        return web.Response(body=RED)

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(RED + bytes(1 << 20))

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(RED) + 9)})
        await response.prepare(request)
        await response.write(RED)
        assert request.transport is not None
        request.transport.close()
        return response


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    listening = socket.create_server(("127.0.0.1", 0))
    made = Origin(listening.getsockname()[1])
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    yield made
    made.release.set()
    await runner.cleanup()


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server fetches from loopback, too."""
    monkeypatch.setattr(generation, "Fetcher", functools.partial(Fetcher, private=True))


@pytest.fixture(autouse=True)
def gives_memory_back() -> Any:
    held = BODIES.promised
    yield
    assert BODIES.promised == held


@asynccontextmanager
async def fetching(origin: Origin, **settings: Any) -> AsyncIterator[Served]:
    async with seeing(**{"image_hosts": f"images.example, {origin.host}", **settings}) as served:
        yield served


async def ask(served: Served, *urls: str) -> Any:
    content = [{"type": "text", "text": "A"}, *map(image_url, urls)]
    return await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})


FIELD = "messages[0].content[1].image_url.url"


@rest(SECONDS)
@pytest.mark.usefixtures("private")
async def test_an_image_of_a_listed_host_is_fetched_once(origin: Origin) -> None:
    async with fetching(origin) as served:
        assert (await ask(served, origin.url(), origin.url(), origin.url("hops/2"))).status == 200
        assert served.engine.requests[-1].prompt == "user: A<image><image><image>\nassistant: "  # type: ignore[attr-defined]
        assert sorted(origin.asked) == ["hops/0", "hops/1", "hops/2", "red.png", "red.png"]
        # It says who asks, and nothing of who asked it.
        assert origin.headers["User-Agent"].startswith("aioinfer/")
        assert origin.headers.keys() == {"Host", "User-Agent", "Accept", "Accept-Encoding"}
        async with claude(served) as client, served.client() as other:
            block: Any = {"type": "image", "source": {"type": "url", "url": origin.url()}}
            message: Any = {"role": "user", "content": [block]}
            await client.messages.create(model="fake", max_tokens=9, messages=[message])
            item: Any = {"type": "input_image", "image_url": origin.url(), "detail": "auto"}
            await other.responses.create(model="fake", input=[{"role": "user", "content": [item]}])
        assert origin.asked[-2:] == ["red.png", "red.png"]


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("status/404", "status 404"),
        ("status/500", "status 500"),
        ("status/206", "status 206"),
        ("text", "is no image of type"),
        ("empty", "the image is empty"),
        ("large", "max_image_bytes"),
        ("endless", "max_image_bytes"),
        ("compressed", "compresses the image"),
        ("cut", "whole image"),
        ("hops/3", "redirected more than 3 times"),
        ("to/?url=", "is redirected"),
        ("to/?url=http://other.example/x.png", "no images from 'other.example:80'"),
        ("to/?url=http://127.0.0.1:1/x.png", "no images from '127.0.0.1:1'"),
        ("to/?url=http://localhost/x.png", "no images from 'localhost:80'"),
        ("to/?url=//169.254.169.254/latest", "no images from '169.254.169.254:80'"),
        ("to/?url=file:///etc/passwd", "is redirected: must be a data URI or an HTTP(S) URL"),
        ("to/?url=data:image/png;base64,AAAA", "is redirected: must be a data URI or an HTTP(S) URL"),
        (f"to/?url=http://{'a.' * 3000}b/", "is redirected: must be a data URI or an HTTP(S) URL"),
        ("to/?url=http://me:secret@images.example/", "is redirected: must have no user"),
    ],
)  # fmt: skip
async def test_what_cannot_be_fetched_is_refused_by_its_field(origin: Origin, path: str, said: str) -> None:
    async with fetching(origin) as served:
        reply = await ask(served, origin.url(path))
        assert reply.refusal == (400, FIELD)
        assert said in reply.error["message"], reply.error
        assert "secret" not in reply.text
        assert not served.engine.requests  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"]
)
async def test_no_name_and_no_spelling_leads_to_this_machine(origin: Origin, host: str) -> None:
    async with fetching(origin, image_hosts=f"{host}:{origin.port}, *:{origin.port}") as served:
        reply = await ask(served, f"http://{host}:{origin.port}/red.png")
        assert reply.refusal == (400, FIELD)
        assert not origin.asked


async def test_a_name_that_resolves_elsewhere_at_the_second_look_leads_nowhere(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the address that is checked is the one that is connected to."""

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", origin.port))]

    async with fetching(origin, image_hosts=f"images.example:{origin.port}") as served:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        reply = await ask(served, f"http://images.example:{origin.port}/red.png")
        monkeypatch.undo()
        assert reply.refusal == (400, FIELD)
        assert "cannot be connected to at a public address" in reply.error["message"]
        assert "127.0.0.1" not in reply.text
        assert not origin.asked


#: addresses that are no host of the Internet: private, of this machine, of a link, of many, reserved
CLOSED = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
    *("224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fc00::1"),
    *("fe80::1%lo", "ff02::1", "fec0::1", "2001:db8::1", "::127.0.0.1", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
]
OPEN = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


def test_addresses_are_public_or_not() -> None:
    assert [each for each in CLOSED if is_public(each)] == []
    assert [each for each in OPEN if not is_public(each)] == []


@pytest.mark.parametrize(
    ("hosts", "url", "allowed"),
    [
        (None, "https://a.b/x", False),
        ("", "https://a.b/x", False),
        ("a.b", "https://a.b/x", True),
        ("a.b", "http://A.B./x", True),
        ("A.b", "http://a.b:80/x", True),
        ("a.b", "http://a.b:8080/x", False),
        ("a.b", "https://a.b:80/x", False),
        ("a.b:8080", "http://a.b:8080/x", True),
        ("a.b:8080", "http://a.b/x", False),
        ("a.b", "https://c.a.b/x", False),
        ("*.a.b", "https://c.a.b/x", True),
        ("*.a.b", "https://d.c.a.b/x", True),
        ("*.a.b", "https://a.b/x", False),
        ("*.a.b", "https://xa.b/x", False),
        ("x.y, a.b", "https://a.b/x", True),
        ("*", "https://a.b/x", True),
        ("*", "https://a.b:22/x", False),
        ("a.b", "https://a.b@c.d/x", False),
        ("a.b", "https://c.d#a.b", False),
        ("a.b", "https://c.d\\@a.b/", False),
        ("a.b", "https://a.b\\@c.d/", False),
        ("xn--bcher-kva.example", "https://bücher.example/x", True),
        ("a.b", "https://a。b/x", True),
        ("*", f"https://{'a.' * 126}b/x", True),
        ("*", f"https://{'a.' * 127}b/x", False),
    ],
)
def test_hosts_are_listed_or_not(hosts: str | None, url: str, allowed: bool) -> None:
    fetcher = Fetcher(ServerConfig(image_hosts=hosts))
    if allowed:
        assert fetcher.check(url, "url").raw_host is not None
        return
    with pytest.raises(InvalidRequest):
        fetcher.check(url, "url")


@pytest.mark.usefixtures("private")
async def test_a_host_that_is_slow_is_not_waited_for(origin: Origin) -> None:
    async with fetching(origin, image_timeout=0.05) as served:
        reply = await ask(served, origin.url("held"))
        assert reply.refusal == (400, FIELD)
        assert "image_timeout" in reply.error["message"]
        await until(lambda: origin.gone == 1)


@pytest.mark.usefixtures("private")
async def test_a_request_fetches_few_at_a_time(origin: Origin) -> None:
    async with fetching(origin) as served:
        asking = asyncio.create_task(ask(served, *[origin.url(f"held?{number}") for number in range(9)]))
        await until(lambda: origin.held == 4)
        origin.release.set()
        assert (await asking).status == 200
        assert len(origin.asked) == 9
        assert origin.most_held == 4


@pytest.mark.usefixtures("private")
async def test_what_is_fetched_ends_with_its_request(origin: Origin) -> None:
    async with fetching(origin, image_timeout=600) as served:
        asking = asyncio.create_task(ask(served, origin.url("held"), origin.url("held?2")))
        await until(lambda: origin.held == 2)
        asking.cancel()
        await until(lambda: origin.gone == 2)
        # So does it with the first failure of another image.
        reply = await ask(served, origin.url("held"), origin.url("missing-behind-held"))
        assert reply.refusal == (400, "messages[0].content[2].image_url.url")
        await until(lambda: origin.gone == 3)
        await until(lambda: idle(served))


@rest(SECONDS)
@pytest.mark.usefixtures("private")
async def test_what_is_fetched_counts_among_bodies(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fetching(origin) as served:
        assert (await ask(served, origin.url())).status == 200
        monkeypatch.setattr(BODIES, "bound", BODIES.promised + (1 << 20))
        reply = await ask(served, origin.url("large?1"))
        assert reply.refusal == (400, FIELD)
        reply = await ask(served, origin.url("endless"))
        assert reply.status == 429
