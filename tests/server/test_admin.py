"""Admin routes: on sockets of their own, for operators of this machine only."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aioinfer.config import ServerConfig
from aioinfer.engine import EngineState
from aioinfer.server import serve
from aioinfer.server.http.listening import bind_all
from tests.server.conftest import Served, Serving
from tests.server.test_adversity import ENDLESS, gate, until
from tests.server.test_mounting import make_engine
from tests.tiers import SECONDS, rest

__all__ = ["gate"]

BODY = {**ENDLESS, "stream": False, "max_tokens": 5}
ROUTES = [
    ("GET", "/stats"),
    ("GET", "/trace"),
    ("GET", "/log-level"),
    ("PUT", "/log-level"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/flush"),
    ("POST", "/abort"),
    ("POST", "/drain"),
]


class Admin:
    """A client of the admin routes."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        url = f"http://localhost{path}"
        async with self._session.request(method, url, json=body, **options) as response:
            assert response.headers["x-request-id"]
            return response.status, await response.json()


@pytest.fixture
def path() -> str:
    return f"/tmp/aioinfer-admin-{os.getpid()}"


@asynccontextmanager
async def administered(
    serving: Serving, path: str, server: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Served, Admin]]:
    async with (
        serving(server={"admin_uds": path, **(server or {})}, **options) as served,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
    ):
        yield served, Admin(session)


async def test_pause_and_resume(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin), aiohttp.ClientSession() as session:
        assert await admin("POST", "/pause") == (200, {"state": "running", "paused": True})
        waiting = asyncio.create_task(session.post(f"{served.url}/v1/completions", json=BODY))
        await until(lambda: served.engine.stats().waiting == 1)
        status, stats = await admin("GET", "/stats")
        assert status == 200
        assert (stats["paused"], stats["waiting"], stats["steps"]) == (True, 1, 0)
        assert await admin("POST", "/resume") == (200, {"state": "running", "paused": False})
        async with await waiting as response:
            assert response.status == 200


async def test_a_request_is_aborted_by_its_id(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin), aiohttp.ClientSession() as session:
        named = {"X-Request-ID": "order-7"}
        url = f"{served.url}/v1/completions"
        asked = asyncio.create_task(session.post(url, json={**ENDLESS, "stream": False}, headers=named))
        await until(lambda: served.engine.stats().running)
        assert await admin("POST", "/abort", {"request_id": "another"}) == (200, {"aborted": 0})
        assert await admin("POST", "/abort", {"request_id": "order-7"}) == (200, {"aborted": 1})
        assert (await asked).status >= 400


async def test_flush_forgets_prefixes(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin), aiohttp.ClientSession() as session:
        body = {**BODY, "prompt": list(range(1, 40))}
        for cached in (False, True):
            async with session.post(f"{served.url}/v1/completions", json=body) as response:
                usage = (await response.json())["usage"]
                assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == cached
        await until(lambda: served.engine.stats().pages_cached > 0)
        status, answer = await admin("POST", "/flush")
        assert status == 200
        assert answer["freed_pages"] > 0
        assert served.engine.stats().pages_cached == 0


async def test_drain_waits_for_open_requests_and_accepts_no_more(
    serving: Serving, path: str, gate: Any
) -> None:
    async with (
        administered(serving, path, fault=gate) as (served, admin),
        aiohttp.ClientSession() as session,
    ):
        url = f"{served.url}/v1/completions"
        running = asyncio.create_task(session.post(url, json=BODY))
        await until(lambda: served.engine.stats().running == 1)
        draining = asyncio.create_task(admin("POST", "/drain", {"timeout": 60}))
        await until(lambda: served.engine.state is EngineState.DRAINING)
        async with session.post(url, json=BODY) as response:
            assert response.status == 503
        assert not draining.done()
        gate.release()
        assert (await running).status == 200
        status, answer = await draining
        assert (status, answer["state"]) == (200, "closed")
        # The process serves on, so that a load balancer sees why.
        async with session.get(f"{served.url}/health") as response:
            assert response.status == 503
        assert (await admin("POST", "/pause"))[0] == 503


async def test_a_paused_engine_can_be_drained(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin), aiohttp.ClientSession() as session:
        await admin("POST", "/pause")
        waiting = asyncio.create_task(session.post(f"{served.url}/v1/completions", json=BODY))
        await until(lambda: served.engine.stats().waiting == 1)
        assert (await admin("POST", "/drain"))[0] == 200
        assert (await waiting).status == 200


@rest(SECONDS)
async def test_the_trace_of_the_next_seconds(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin), aiohttp.ClientSession() as session:
        collecting = asyncio.create_task(admin("GET", "/trace?seconds=0.3"))
        async with session.post(f"{served.url}/v1/completions", json=BODY) as response:
            assert response.status == 200
        status, trace = await collecting
        assert status == 200
        assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "b", "e"}
        for wrong in ("61", "-1", "x", "nan", "inf"):
            status, answer = await admin("GET", f"/trace?seconds={wrong}")
            assert (status, answer["error"]["param"]) == (400, "seconds")


async def test_the_log_level_of_the_package(serving: Serving, path: str) -> None:
    root, own = logging.getLogger(), logging.getLogger("aioinfer")
    before = root.level, own.level
    try:
        async with administered(serving, path) as (_, admin):
            assert await admin("PUT", "/log-level", {"level": "debug"}) == (200, {"level": "debug"})
            assert own.level == logging.DEBUG
            assert root.level == before[0]
            assert await admin("GET", "/log-level") == (200, {"level": "debug"})
            for body in ({}, {"level": "all"}, {"level": 10}, {"level": None}):
                assert (await admin("PUT", "/log-level", body))[0] == 400
    finally:
        own.setLevel(before[1])


@pytest.mark.parametrize(
    "body", [[], {"timeout": -1}, {"timeout": "9"}, {"timeout": True}, {"seconds": 1}, 7]
)
async def test_a_wrong_body_is_refused_and_nothing_is_done(serving: Serving, path: str, body: Any) -> None:
    async with administered(serving, path) as (served, admin):
        status, answer = await admin("POST", "/drain", body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        status, _ = await admin("POST", "/drain", data=b"{")
        assert status == 400
        assert served.engine.ready


async def test_admin_routes_are_on_no_other_socket(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin), aiohttp.ClientSession() as session:
        for method, route in ROUTES:
            for prefix in ("", "/v1", "/admin"):
                async with session.request(method, served.url + prefix + route) as response:
                    assert response.status == 404
        assert served.engine.ready
        assert not served.engine.stats().paused
        # Nor are the public routes on this one.
        assert (await admin("GET", "/v1/models"))[0] == 404
        assert (await admin("GET", "/pause"))[0] == 405


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_no_page_and_nobody_without_the_key_may_use_them(
    serving: Serving, path: str, method: str, route: str
) -> None:
    async with administered(serving, path, {"admin_key": "secret", "api_key": "other"}) as (served, admin):
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer other"}, 401),
            ({"Authorization": "Bearer secret", "Origin": "http://localhost"}, 403),
            ({"Authorization": "Bearer secret", "Host": "evil.example"}, 403),
        ):
            found, answer = await admin(method, route, headers=headers)
            assert found == status, headers
            assert answer["error"]["message"]
        assert served.engine.ready
        assert not served.engine.stats().paused


async def test_the_admin_port_is_on_loopback() -> None:
    """Whatever the public routes listen on."""
    config = ServerConfig(host="0.0.0.0", insecure=True, port=0, admin_port=0)
    bound = await bind_all(config)
    (admin,) = bound.admin
    host, port = admin.getsockname()
    assert host == "127.0.0.1"
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with make_engine() as engine:
        task = asyncio.create_task(serve(engine, config, stop=stop, ready=ready.set_result, sockets=bound))
        try:
            await ready
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/stats") as response,
            ):
                assert (await response.json())["state"] == "running"
        finally:
            stop.set()
            await task
    assert admin.fileno() == -1


async def test_without_settings_there_is_no_such_socket() -> None:
    bound = await bind_all(ServerConfig(port=0))
    assert bound.admin == []
    bound.close()


async def test_weights_are_loaded_from_their_root_only(serving: Serving, path: str, tmp_path: Path) -> None:
    """Without a root there is no such route."""
    async with administered(serving, path) as (_, admin):
        assert (await admin("POST", "/update_weights", {"path": "a"}))[0] == 404
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("x", "linked", "deeper", "piped"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked" / "config.json").symlink_to("/etc/passwd")
    (tmp_path / "deeper" / "out").symlink_to("/etc")
    os.mkfifo(tmp_path / "piped" / "model.safetensors")
    async with administered(serving, path, {"weights_root": str(tmp_path)}) as (_, admin):
        for given, message in (
            ({}, "path: is missing"),
            ({"path": "../x"}, "path: '../x' lies outside of weights_root"),
            ({"path": "/etc"}, "path: '/etc' lies outside of weights_root"),
            ({"path": "link/x"}, "path: 'link/x' lies outside of weights_root"),
            ({"path": "loop"}, "path: "),
            ({"path": "\ud800"}, "path: "),
            ({"path": "a\0b"}, "path: has a NUL character"),
            ({"path": "y" * 5000}, "path: is longer than 4096"),
            ({"path": "nothing"}, "path: there is nothing at 'nothing' in weights_root"),
            ({"path": "linked"}, "path: 'config.json' is a link that leads outside of weights_root"),
            ({"path": "deeper"}, "path: 'out' is a link that leads outside of weights_root"),
            ({"path": "piped"}, "path: 'model.safetensors' is no regular file"),
            ({"path": "x", "mode": "now"}, "mode: must be one of keep, wait, abort"),
            ({"path": "x", "version": -1}, "version: must be an integer greater than 0"),
            ({"path": "x", "other": 1}, "other: is not a field that this server knows"),
        ):
            status, body = await admin("POST", "/update_weights", given)
            assert status == 400
            assert message in body["error"]["message"]
        status, body = await admin("POST", "/update_weights", {"path": "x"})
        assert status == 400, "a toy has no weights in files"
        assert (await admin("GET", "/stats"))[1]["weight_version"] == 0
