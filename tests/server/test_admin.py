"""Admin routes: on sockets of their own, for operators of this machine only."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import ServerConfig
from aioinfer.engine import EngineState
from aioinfer.ledger import Share
from aioinfer.server.http.listening import bind_all
from tests.engine.conftest import Gate
from tests.server.calls import Http, http
from tests.server.conftest import Served, Serving, run_server
from tests.server.test_adversity import ENDLESS, PATH, until
from tests.server.test_mounting import make_engine
from tests.tiers import SECONDS, rest

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

    def __init__(self, client: Http) -> None:
        self._client = client

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        reply = await self._client(method, path, body, **headers)
        assert reply.headers["x-request-id"]
        return reply.status, reply.json()


@pytest.fixture
def path() -> str:
    return f"/tmp/aioinfer-admin-{os.getpid()}"


@asynccontextmanager
async def administered(
    serving: Serving, path: str, server: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Served, Admin]]:
    async with (
        serving(server={"admin_uds": path, **(server or {})}, **options) as served,
        http(f"unix:{path}") as client,
    ):
        yield served, Admin(client)


async def test_pause_and_resume(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin):
        assert await admin("POST", "/pause") == (200, {"state": "running", "paused": True})
        waiting = asyncio.create_task(served.post(PATH, BODY))
        await until(lambda: served.engine.stats().waiting == 1)
        status, stats = await admin("GET", "/stats")
        assert status == 200
        assert (stats["paused"], stats["waiting"], stats["steps"]) == (True, 1, 0)
        assert await admin("POST", "/resume") == (200, {"state": "running", "paused": False})
        assert (await waiting).status == 200


async def test_a_request_is_aborted_by_its_id(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin):
        asked = asyncio.create_task(served.post(PATH, {**ENDLESS, "stream": False}, X_Request_ID="order-7"))
        await until(lambda: served.engine.stats().running)
        assert await admin("POST", "/abort", {"request_id": "another"}) == (200, {"aborted": 0})
        assert await admin("POST", "/abort", {"request_id": "order-7"}) == (200, {"aborted": 1})
        assert (await asked).status >= 400


async def test_flush_forgets_prefixes(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin):
        for cached in (False, True):
            usage = (await served.post(PATH, {**BODY, "prompt": [*range(1, 40)]})).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == cached
        await until(lambda: served.engine.stats().pages_cached > 0)
        status, answer = await admin("POST", "/flush")
        assert status == 200
        assert answer["freed_pages"] > 0
        assert served.engine.stats().pages_cached == 0


async def test_drain_waits_for_open_requests_and_accepts_no_more(
    serving: Serving, path: str, gate: Gate
) -> None:
    async with administered(serving, path, fault=gate) as (served, admin):
        running = asyncio.create_task(served.post(PATH, BODY))
        await until(lambda: served.engine.stats().running == 1)
        draining = asyncio.create_task(admin("POST", "/drain", {"timeout": 60}))
        await until(lambda: served.engine.state is EngineState.DRAINING)
        assert (await served.post(PATH, BODY)).status == 503
        assert not draining.done()
        gate.release()
        assert (await running).status == 200
        status, answer = await draining
        assert (status, answer["state"]) == (200, "closed")
        # The process serves on, so that a load balancer sees why.
        assert (await served.get("/health")).status == 503
        assert (await admin("POST", "/pause"))[0] == 503


async def test_a_paused_engine_can_be_drained(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin):
        await admin("POST", "/pause")
        waiting = asyncio.create_task(served.post(PATH, BODY))
        await until(lambda: served.engine.stats().waiting == 1)
        assert (await admin("POST", "/drain"))[0] == 200
        assert (await waiting).status == 200


@rest(SECONDS)
async def test_the_trace_of_the_next_seconds(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin):
        collecting = asyncio.create_task(admin("GET", "/trace?seconds=0.3"))
        assert (await served.post(PATH, BODY)).status == 200
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


async def test_a_wrong_body_is_refused_and_nothing_is_done(serving: Serving, path: str) -> None:
    bodies = ([], {"timeout": -1}, {"timeout": "9"}, {"timeout": True}, {"seconds": 1}, 7, b"{")
    async with administered(serving, path) as (served, admin):
        for body in bodies:
            status, answer = await admin("POST", "/drain", body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), body
        assert served.engine.ready


async def test_admin_routes_are_on_no_other_socket(serving: Serving, path: str) -> None:
    async with administered(serving, path) as (served, admin):
        for method, route in ROUTES:
            for prefix in ("", "/v1", "/admin"):
                assert (await served.http(method, prefix + route)).status == 404
        assert served.engine.ready
        assert not served.engine.stats().paused
        # Nor are the public routes on this one.
        assert (await admin("GET", "/v1/models"))[0] == 404
        assert (await admin("GET", "/pause"))[0] == 405


async def test_no_page_and_nobody_without_the_key_may_use_them(serving: Serving, path: str) -> None:
    async with administered(serving, path, {"admin_key": "secret", "api_key": "other"}) as (served, admin):
        for method, route in ROUTES:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer other"}, 401),
                ({"Authorization": "Bearer secret", "Origin": "http://localhost"}, 403),
                ({"Authorization": "Bearer secret", "Host": "evil.example"}, 403),
            ):
                found, answer = await admin(method, route, **headers)
                assert found == status, (route, headers)
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
    async with (
        make_engine() as engine,
        run_server(engine, config, sockets=bound),
        http(f"http://127.0.0.1:{port}") as client,
    ):
        assert (await client.get("/stats")).json()["state"] == "running"
    assert admin.fileno() == -1


async def test_without_settings_there_is_no_such_socket() -> None:
    bound = await bind_all(ServerConfig(port=0))
    assert bound.admin == []
    bound.close()


async def test_weights_are_loaded_from_their_root_only(serving: Serving, path: str, tmp_path: Path) -> None:
    """Without a root there is no such route. Paths are confined as those of adapters are; of a directory,
    everything below has to be a regular file there."""
    async with administered(serving, path) as (_, admin):
        assert (await admin("POST", "/update_weights", {"path": "a"}))[0] == 404
    for name in ("x", "linked", "deeper", "piped"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked" / "config.json").symlink_to("/etc/passwd")
    (tmp_path / "deeper" / "out").symlink_to("/etc")
    os.mkfifo(tmp_path / "piped" / "model.safetensors")
    async with administered(serving, path, {"weights_root": str(tmp_path)}) as (_, admin):
        for given, message in (
            ({}, "path: is missing"),
            ({"path": "../x"}, "path: '../x' lies outside of weights_root"),
            ({"path": "\ud800"}, "path: "),
            ({"path": "y" * 5000}, "path: is longer than 4096"),
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


async def test_connections_are_bounded_in_number_and_in_time(serving: Serving, path: str) -> None:
    """Whoever may connect to the socket takes no files from the public one."""
    times = {"header_timeout": 600.0, "body_timeout": 0.05, "admin_key": "not known to all"}
    async with administered(serving, path, times) as (served, admin):
        opened = [await asyncio.open_unix_connection(path) for _ in range(60)]
        for _, writer in opened:
            writer.write(b"GET /st")
        closed = [asyncio.create_task(reader.read()) for reader, _ in opened]
        await until(lambda: sum(each.done() for each in closed) >= 60 - 32)
        assert (await served.get("/health")).status == 200
        # Those without a request make room.
        assert (await admin("GET", "/stats", Authorization="Bearer not known to all"))[0] == 200
        for _, writer in opened:
            writer.transport.abort()
        await asyncio.wait(closed)


async def test_connections_without_a_whole_request_are_closed(serving: Serving, path: str) -> None:
    async with administered(serving, path, {"header_timeout": 0.05}):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /stats HTTP/1.1\r\nHost: loc")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_a_body_that_does_not_arrive_keeps_nobody_waiting(serving: Serving, path: str) -> None:
    async with administered(serving, path, {"body_timeout": 0.05}) as (_, admin):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"PUT /log-level HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{")
        async with asyncio.timeout(60):
            assert b" 408 " in (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]
        writer.close()
        assert (await admin("GET", "/stats"))[0] == 200


async def test_the_shares_of_the_memory_are_among_the_statistics_and_the_metrics(
    serving: Serving, path: str
) -> None:
    async with administered(serving, path) as (served, admin):
        pool = Share("KV pages", 7000, 3000)
        shares = (await admin("GET", "/stats"))[1]["memory"]
        assert shares["KV pages"]["promised"] >= 7000
        assert shares["bodies"]["bound"] >= 64 << 20
        text = (await served.get("/metrics")).text
        for name in ("promised", "taken"):
            assert f"aioinfer_memory_{name}_bytes{{" in text
        pool.close()
