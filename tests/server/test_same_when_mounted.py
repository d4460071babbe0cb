"""A request has the same answer from ``serve``, from an application that mounts the engine, and by ASGI."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from aioinfer.server import asgi_app, setup
from tests.asgi import uvicorned
from tests.server.calls import http
from tests.server.conftest import Serving
from tests.server.raw import errors
from tests.server.test_mounting import make_engine, running
from tests.tiers import nightly

GOOD = json.dumps({"prompt": [1, 2], "max_tokens": 2, "temperature": 0}).encode()
TYPE = ("Content-Type", "application/json")


@asynccontextmanager
async def mounted() -> AsyncIterator[str]:
    app = web.Application()
    setup(app, make_engine())
    async with running(app) as url:
        yield url


@asynccontextmanager
async def by_asgi() -> AsyncIterator[str]:
    async with uvicorned(asgi_app(make_engine())) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(params=["serve", "mounted", "asgi"])
def either(
    request: pytest.FixtureRequest, serving: Serving
) -> Callable[[], AbstractAsyncContextManager[str]]:
    """The base URL of a server."""

    @asynccontextmanager
    async def served() -> AsyncIterator[str]:
        async with serving() as running_server:
            yield running_server.url

    return {"serve": served, "mounted": mounted, "asgi": by_asgi}[request.param]


Either = Callable[[], AbstractAsyncContextManager[str]]

BODIES = {
    "plain": ([], GOOD, 200),
    "gzip": (["gzip"], gzip.compress(GOOD), 200),
    "x-gzip": (["x-gzip"], gzip.compress(GOOD), 200),
    "deflate": (["deflate"], zlib.compress(GOOD), 200),
    "raw deflate": (["deflate"], zlib.compress(GOOD)[2:-4], 200),
    "not gzip": (["gzip"], GOOD, 400),
    "not deflate": (["deflate"], GOOD, 400),
    "gzip as deflate": (["deflate"], gzip.compress(GOOD), 400),
    "zlib as gzip": (["gzip"], zlib.compress(GOOD), 400),
    "empty": (["gzip"], b"", 400),
    "twice": (["gzip", "gzip"], gzip.compress(gzip.compress(GOOD)), 415),
    "twice, not gzip": (["gzip", "gzip"], GOOD, 415),
    "two": (["identity", "gzip"], gzip.compress(GOOD), 415),
    "a list": (["gzip, deflate"], GOOD, 415),
}


@nightly("many calls, each of them to two servers")
@pytest.mark.parametrize("either", ["mounted", "asgi"], indirect=True)  # of serve: test_access
@pytest.mark.parametrize("case", BODIES)
async def test_encodings(either: Either, case: str, caplog: pytest.LogCaptureFixture) -> None:
    encodings, body, status = BODIES[case]
    headers = CIMultiDict([TYPE, *(("Content-Encoding", each) for each in encodings)])
    async with either() as url, aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
                answer = await response.json()
                assert response.status == status, answer
                assert ("choices" in answer) == (status == 200)
                assert status == 200 or answer["error"]["type"] == "invalid_request_error"
    assert not errors(caplog)


@pytest.mark.parametrize(("expect", "status"), [("100-Continue", 200), ("else", 417)])
@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
async def test_expectations(either: Either, expect: str, status: int, path: str) -> None:
    async with either() as url, http(url) as client:
        method, body = ("POST", GOOD) if "completions" in path else ("GET", None)
        reply = await client(method, path, body, Expect=expect)
        assert reply.status == status
        if status == 417:
            assert "'else' is not supported" in reply.error["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8000", 200), ("evil.example", 403), ("evil.example:80", 403)],
)
async def test_hosts_of_traces(either: Either, host: str, status: int) -> None:
    async with either() as url, http(url) as client:
        reply = await client.get("/debug/trace", Host=host)
        assert (reply.status, "error" in reply.json()) == (status, status == 403)


@pytest.mark.parametrize("host", ["192.0.2.7", "192.0.2.7:8000", "[2001:db8::1]:80"])
async def test_a_mounted_trace_can_be_read_under_an_address(host: str) -> None:
    """Where the application listens is its own decision. An address cannot be rebound."""
    async with mounted() as url, http(url) as client:
        for origin, status in (("", 200), (f"http://{host}", 200), ("http://evil.example", 403)):
            given = {"Origin": origin} if origin else {}
            assert (await client.get("/debug/trace", Host=host, **given)).status == status
