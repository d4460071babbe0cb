"""Hosts, origins and types of bodies: what a server answers, and to which pages."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from aioinfer.config import ServerConfig, is_loopback
from aioinfer.server.http.failures import Failure
from tests.server.conftest import Connect, Serving
from tests.server.raw import errors, request
from tests.server.test_adversity import ENDLESS

BODY = {**ENDLESS, "stream": False, "max_tokens": 3}
PAGE = "https://chat.example"
MODELS, TRACE = "/v1/models", "/debug/trace"


# -- hosts and origins ---------------------------------------------------------------------------------

OPEN = {"insecure": True, "host": "0.0.0.0"}


@pytest.mark.parametrize(
    ("settings", "path", "host", "status"),
    [
        ({}, MODELS, "localhost:8000", 200),
        ({}, MODELS, "LOCALHOST", 200),
        ({}, MODELS, "app.localhost:80", 200),
        ({}, MODELS, "127.0.0.1", 200),
        ({}, MODELS, "127.8.8.8:8000", 200),
        ({}, MODELS, "[::1]:8000", 200),
        ({}, MODELS, "evil.example:8000", 403),
        ({}, MODELS, "localhost.evil.example", 403),
        ({}, MODELS, "127.0.0.1.evil.example", 403),
        ({}, MODELS, "192.168.1.5:8000", 403),
        ({}, MODELS, "", 403),
        ({"allowed_hosts": "llm.example, other.example"}, MODELS, "LLM.example:443", 200),
        ({"allowed_hosts": "llm.example"}, MODELS, "localhost", 200),
        ({"allowed_hosts": "llm.example"}, MODELS, "evil.example", 403),
        ({"allowed_hosts": "*"}, MODELS, "evil.example", 200),
        # Where pages cannot have the key, or names are not known, a host has to be asked for,
        (OPEN, MODELS, "gpu-box:8000", 200),
        ({**OPEN, "allowed_hosts": "gpu-box"}, MODELS, "evil.example", 403),
        # but not to read what an engine does.
        (OPEN, TRACE, "192.168.1.5:8000", 200),
        (OPEN, TRACE, "evil.example", 403),
        ({**OPEN, "allowed_hosts": "gpu-box"}, TRACE, "gpu-box", 200),
        ({"api_key": "k"}, TRACE, "evil.example", 401),
    ],
)
async def test_hosts(
    serving: Serving, connect: Connect, settings: dict[str, Any], path: str, host: str, status: int
) -> None:
    async with serving(server=settings) as served:
        raw = await connect(served)
        await raw.send(request(path=path, Host=host))
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
    async with serving(server=server) as served:
        path = "/v1/completions"
        asked = await served.http(
            "OPTIONS",
            path,
            Origin=PAGE,
            Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="authorization,x-stainless-lang",
        )
        assert asked.status == 204
        assert asked.headers["Access-Control-Allow-Origin"] == PAGE
        assert "POST" in asked.headers["Access-Control-Allow-Methods"]
        assert asked.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-lang"
        # A script can read errors, too.
        for body, key, status in ((BODY, "k", 200), ({**BODY, "stream": True}, "k", 200), (BODY, "", 401)):
            reply = await served.post(path, body, Origin=PAGE, Authorization=f"Bearer {key}")
            assert reply.status == status
            assert reply.headers["Access-Control-Allow-Origin"] == PAGE
            assert reply.headers["Vary"] == "Origin"
        reply = await served.post(path, BODY, Origin="https://a.example", Authorization="Bearer k")
        assert reply.status == 403
        assert "Access-Control-Allow-Origin" not in reply.headers


async def test_any_origin_can_be_allowed(serving: Serving) -> None:
    async with serving(server={"cors_origins": "*"}) as served:
        for origin in ("https://a.example", "null"):
            reply = await served.get(MODELS, Origin=origin)
            assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200, origin)


def test_loopback_names() -> None:
    for host in ("localhost", "a.localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert is_loopback(host)
        ServerConfig(host=host)
    for host in ("", "localhost.example", "0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example"):
        assert not is_loopback(host)


async def test_a_wrong_method_names_the_right_ones(serving: Serving) -> None:
    async with serving() as served:
        for method, path, allowed in (("GET", "/v1/completions", "POST"), ("DELETE", MODELS, "GET,HEAD")):
            reply = await served.http(method, path)
            assert (reply.status, reply.headers["Allow"]) == (405, allowed)
            assert reply.error["message"]


def test_errors_are_of_bounded_length() -> None:
    error = Failure(400, "x", "m" * 10**6, param="p" * 10**6).body()["error"]
    assert len(json.dumps(error)) < 3000
    assert error["message"].startswith("mmm")


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
    async with serving() as served:
        for _ in range(2):
            reply = await served.post("/v1/completions", body, Content_Encoding=encoding)
            assert reply.status == status
            assert len(reply.text) < 3000
    assert not errors(caplog)
