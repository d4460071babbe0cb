"""Keys, hosts, origins and types of bodies: what a server answers, and to which pages."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import aiohttp
import pytest

from aioinfer.config import ServerConfig, is_loopback
from aioinfer.server.http.failures import Failure
from tests.server.conftest import Connect, Serving
from tests.server.raw import errors, request
from tests.server.test_adversity import ENDLESS

BODY = {**ENDLESS, "stream": False, "max_tokens": 3}
PAGE = "https://chat.example"


# -- hosts and origins ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "localhost:8000", 200),
        ({}, "LOCALHOST", 200),
        ({}, "app.localhost:80", 200),
        ({}, "127.0.0.1", 200),
        ({}, "127.8.8.8:8000", 200),
        ({}, "[::1]:8000", 200),
        ({}, "evil.example:8000", 403),
        ({}, "localhost.evil.example", 403),
        ({}, "127.0.0.1.evil.example", 403),
        ({}, "192.168.1.5:8000", 403),
        ({}, "", 403),
        ({"allowed_hosts": "llm.example, other.example"}, "LLM.example:443", 200),
        ({"allowed_hosts": "llm.example"}, "localhost", 200),
        ({"allowed_hosts": "llm.example"}, "evil.example", 403),
        ({"allowed_hosts": "*"}, "evil.example", 200),
        # Where pages cannot have the key, or names are not known, a host has to be asked for.
        ({"insecure": True, "host": "0.0.0.0"}, "gpu-box:8000", 200),
        ({"insecure": True, "host": "0.0.0.0", "allowed_hosts": "gpu-box"}, "evil.example", 403),
    ],
)
async def test_hosts(
    serving: Serving, connect: Connect, settings: dict[str, Any], host: str, status: int
) -> None:
    async with serving(server=settings) as served:
        raw = await connect(served)
        await raw.send(request(path="/v1/models", Host=host))
        assert await raw.status() == status
        # Monitors may ask by any name.
        await raw.send(request(Host=host))
        assert await raw.status() == 200


async def test_a_second_host_is_checked_too(serving: Serving, connect: Connect) -> None:
    async with serving() as served:
        raw = await connect(served)
        await raw.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert await raw.status() in (400, 403)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("http://localhost:3000", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
async def test_requests_of_other_pages_are_a_403(
    serving: Serving, connect: Connect, origin: str, status: int
) -> None:
    async with serving(server={"api_key": "k"}) as served:
        for method, path, body in (("GET", "/v1/models", None), ("POST", "/v1/completions", BODY)):
            raw = await connect(served)
            await raw.send(request(method, path, body, Origin=origin, Authorization="Bearer k"))
            assert await raw.status() == status
        assert served.engine.stats().finished == (1 if status == 200 else 0)
        raw = await connect(served)
        await raw.send(request("OPTIONS", "/v1/models", Origin=origin, Access_Control_Request_Method="GET"))
        # A page of the same origin needs no preflight request.
        assert await raw.status() == (204 if status == 200 else 403)


async def test_pages_of_listed_origins_may_use_the_server(serving: Serving) -> None:
    server = {"cors_origins": f"{PAGE}/, http://localhost:3000", "api_key": "k"}
    async with serving(server=server) as served, aiohttp.ClientSession() as session:
        url = f"{served.url}/v1/completions"
        asked = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-lang",
        }
        async with session.options(url, headers=asked) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-lang"
        key = {"Origin": PAGE, "Authorization": "Bearer k"}
        for stream in (True, False):
            async with session.post(url, json={**BODY, "stream": stream}, headers=key) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert response.headers["Vary"] == "Origin"
        # A script can read errors, too.
        async with session.post(url, json=BODY, headers={"Origin": PAGE}) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
        async with session.post(url, json=BODY, headers={**key, "Origin": "https://a.example"}) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_any_origin_can_be_allowed(serving: Serving) -> None:
    async with serving(server={"cors_origins": "*"}) as served, aiohttp.ClientSession() as session:
        for origin in ("https://a.example", "null"):
            async with session.get(f"{served.url}/v1/models", headers={"Origin": origin}) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == origin


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "localhost", 200),
        ({}, "evil.example", 403),
        ({"insecure": True, "host": "0.0.0.0"}, "192.168.1.5:8000", 200),
        ({"insecure": True, "host": "0.0.0.0"}, "evil.example", 403),
        ({"insecure": True, "host": "0.0.0.0", "allowed_hosts": "gpu-box"}, "gpu-box", 200),
        ({"api_key": "k"}, "evil.example", 401),
    ],
)
async def test_the_trace_cannot_be_read_by_rebinding(
    serving: Serving, connect: Connect, settings: dict[str, Any], host: str, status: int
) -> None:
    async with serving(server=settings) as served:
        raw = await connect(served)
        await raw.send(request(path="/debug/trace", Host=host))
        assert await raw.status() == status


def test_loopback_names() -> None:
    for host in ("localhost", "a.localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert is_loopback(host)
        ServerConfig(host=host)
    for host in ("", "localhost.example", "0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example"):
        assert not is_loopback(host)


# -- keys and methods ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "status", "code", "word"),
    [
        ("Bearer secret", 200, None, ""),
        ("bearer secret", 200, None, ""),
        ("BEARER   secret ", 200, None, ""),
        (None, 401, None, "missing"),
        ("", 401, None, "missing"),
        ("Bearer", 401, None, "missing"),
        ("Basic secret", 401, None, "missing"),
        ("Bearer wrong", 401, "invalid_api_key", "wrong"),
        ("Bearer secretsecret", 401, "invalid_api_key", "wrong"),
    ],
)
async def test_a_missing_key_and_a_wrong_key_are_told_apart(
    serving: Serving, given: str | None, status: int, code: str | None, word: str
) -> None:
    headers = {} if given is None else {"Authorization": given}
    async with (
        serving(server={"api_key": "secret"}) as served,
        aiohttp.ClientSession() as session,
        session.get(f"{served.url}/v1/models", headers=headers) as response,
    ):
        assert response.status == status
        if status == 401:
            error = (await response.json())["error"]
            assert word in error["message"]
            assert error["code"] == code
            assert response.headers["WWW-Authenticate"].startswith("Bearer")


async def test_a_wrong_method_names_the_right_ones(serving: Serving) -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
        async with session.delete(f"{served.url}/v1/models") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "GET,HEAD"


def test_errors_are_of_bounded_length() -> None:
    error = Failure(400, "x", "m" * 10**6, param="p" * 10**6).body()["error"]
    assert len(json.dumps(error)) < 3000
    assert error["message"].startswith("mmm")


async def test_long_values_are_not_sent_back_whole(serving: Serving) -> None:
    long = "x" * 100_000
    bodies = [{**BODY, "model": long}, {**BODY, "temperature": long}, {**BODY, "functions": [long]}]
    async with serving() as served, aiohttp.ClientSession() as session:
        for body in bodies:
            async with session.post(f"{served.url}/v1/completions", json=body) as response:
                assert response.status in (400, 404)
                assert len(await response.read()) < 3000


# -- bodies --------------------------------------------------------------------------------------------

GOOD = json.dumps(BODY).encode()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON; charset=UTF-8", 200),
        ("application/json; charset=latin-1", 400),
        ("application/json; charset=no-such-thing", 400),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/octet-stream", 415),
        ("json", 415),
        ("", 415),
    ],
)
async def test_types_of_bodies(serving: Serving, connect: Connect, content_type: str, status: int) -> None:
    async with serving() as served:
        raw = await connect(served)
        await raw.send(request("POST", "/v1/completions", BODY, Content_Type=content_type))
        assert await raw.status() == status


def gzipped(body: bytes) -> bytes:
    """Without the time: every process must collect the same tests."""
    return gzip.compress(body, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzipped(GOOD), 200),
        ("deflate", zlib.compress(GOOD), 200),
        ("gzip", gzipped(GOOD) + b"more", 400),
        ("deflate", zlib.compress(GOOD) + b"more", 400),
        ("gzip", gzipped(b" " * (8 << 20)), 413),
        ("deflate", zlib.compress(b" " * (8 << 20)), 413),
        ("identity", GOOD, 200),
        ("gzip", GOOD, 400),
        ("gzip", b"", 400),
        ("gzip", gzipped(GOOD)[:-20], 400),
        ("gzip", gzipped(GOOD)[:9], 400),
        ("gzip", gzipped(GOOD)[:12] + b"\x00" * 30, 400),
        ("gzip", gzipped(b"\xff\xfe\xfa"), 400),
        ("deflate", GOOD, 400),
        ("deflate", zlib.compress(GOOD)[2:-4], 200),
        ("deflate", zlib.compress(GOOD)[:-10], 400),
        ("deflate", gzipped(GOOD), 400),
        ("gzip", zlib.compress(GOOD), 400),
        ("identity", b'{"prompt": "\xff"}', 400),
        ("br", GOOD, 415),
        ("zstd", GOOD, 415),
        ("gzip, gzip", gzipped(gzipped(GOOD)), 415),
        ("compress", GOOD, 415),
        ("x" * 5000, GOOD, 415),
    ],
)
async def test_encodings_of_bodies(
    serving: Serving, caplog: pytest.LogCaptureFixture, encoding: str, body: bytes, status: int
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with serving() as served, aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.post(f"{served.url}/v1/completions", data=body, headers=headers) as response:
                assert response.status == status
                assert len(await response.read()) < 3000
    assert not errors(caplog)
