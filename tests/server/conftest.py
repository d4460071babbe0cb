"""A real server on loopback over the toy device, and real clients."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import Device
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.server import serve
from aioinfer.server.http import connections as watched
from aioinfer.server.http.connections import Connections
from aioinfer.server.http.keys import Key
from tests.engine.conftest import Gate
from tests.server.calls import Http, Reply, http
from tests.server.raw import Raw
from tests.toys import ToyDevice, ToyTokenizer


def without_certificates() -> openai.DefaultAsyncHttpxClient:
    """The client that openai's makes by itself, but for the authorities' certificates, which take longer to
    read than most tests run. Servers here speak plain HTTP."""
    return openai.DefaultAsyncHttpxClient(verify=False)


@dataclass
class Running:
    """A server and its task."""

    url: str
    stop: asyncio.Event
    task: asyncio.Task[None]


@asynccontextmanager
async def run_server(engine: EngineLike, config: ServerConfig, **options: Any) -> AsyncIterator[Running]:
    """What ``serve`` runs, from the moment in which it accepts requests. It closes the engine at its end."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[str] = loop.create_future()
    stop = asyncio.Event()
    task = loop.create_task(serve(engine, config, stop=stop, ready=started.set_result, **options))
    first: list[asyncio.Future[Any]] = [task, started]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield Running(started.result(), stop, task)
    finally:
        stop.set()
        await task


@dataclass
class Served:
    """A running server over the toy device."""

    engine: Engine
    device: Any
    running: Running
    http: Http

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.http.get(path, **headers)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await self.http.post(path, body, **headers)

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, *, strict: bool = True, **options: Any) -> openai.AsyncOpenAI:
        """A client that checks every answer against its types. (Streamed completions need ``strict=False``:
        the type of their chunks has no null for the finish reason, which OpenAI itself sends.)"""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=options.pop("api_key", "none"),
            max_retries=0,
            http_client=without_certificates(),
            _strict_response_validation=strict,
            **options,
        )


Serving = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serving() -> Serving:
    @asynccontextmanager
    async def run(
        *,
        server: dict[str, Any] | None = None,
        fault: Any = None,
        tokenizer: ToyTokenizer | None = None,
        device: Device | None = None,
        **settings: Any,
    ) -> AsyncIterator[Served]:
        config = EngineConfig(
            model="toy", **{"page_size": 4, "num_pages": 4096, "max_running_requests": 256, **settings}
        )
        served = device or ToyDevice(
            num_pages=config.num_pages or 0,
            page_size=config.page_size,
            num_slots=config.num_slots,
            max_model_len=4096,
            fault=fault,
        )
        engine = Engine(
            config, launcher=lambda _: ThreadLauncher(served), tokenizer=lambda _: tokenizer or ToyTokenizer()
        )
        async with run_server(
            engine, ServerConfig(port=0, **{"drain_timeout": 60.0, **(server or {})})
        ) as running:
            try:
                async with http(running.url) as calls:
                    yield Served(engine, served, running, calls)
            finally:
                if hasattr(fault, "release"):
                    fault.release()

    return run


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Holds the steps of a device."""
    gate = Gate()
    yield gate
    gate.release()


Connect = Callable[[Served], Awaitable[Raw]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens connections to a server, which are closed behind the test."""
    opened: list[Raw] = []

    async def connect(served: Served) -> Raw:
        opened.append(Raw(*await asyncio.open_connection("127.0.0.1", served.port)))
        return opened[-1]

    yield connect
    for each in opened:
        await each.close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connections]:
    """Those of each server of the test. They are looked at often."""
    made: list[Connections] = []
    construct = Connections.__init__

    def recorded(self: Connections, **settings: Any) -> None:
        construct(self, **settings)
        made.append(self)

    monkeypatch.setattr(Connections, "__init__", recorded)
    monkeypatch.setattr(watched, "_LOOK_INTERVAL", 0.01)
    return made


def age(connections: Connections) -> None:
    """An hour passes for the connections that are open."""
    for each in connections._open:
        each.opened -= 3600.0


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a key has used does not come back."""
    defaults: Any = Key.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "clock", lambda: 0.0)


def site(client: openai.AsyncOpenAI) -> str:
    """The address of the server of a client."""
    return str(client.base_url).removesuffix("/v1/")


Bundled = Callable[..., AbstractAsyncContextManager[openai.AsyncOpenAI]]


def copy_that_reads_tools(directory: Path) -> Path:
    """A copy of the bundled model whose template reads tools, although its text does not depend on them, and
    prints calls."""
    shutil.copytree(EngineConfig().model_path, directory)
    template = directory / "chat_template.jinja"
    called = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    calls = "{% if tools %}{% endif %}{% for m in messages %}" + called + "{% endfor %}"
    template.write_text(calls + template.read_text())
    return directory


@pytest.fixture(scope="session")
def model_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_that_reads_tools(tmp_path_factory.mktemp("bundled") / "model")


@pytest.fixture
def bundled(model_with_tools: Path) -> Bundled:
    """A client of a server with the bundled model."""

    @asynccontextmanager
    async def run(
        model: Path | None = None, server: dict[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[openai.AsyncOpenAI]:
        settings = {"model": str(model or model_with_tools), "tool_call_parser": "hermes", **settings}
        engine = Engine(EngineConfig(threads=1, dtype="float32", **settings))
        config = ServerConfig(**{"port": 0, "served_model_name": "tiny-chat", **(server or {})})
        async with (
            engine,
            run_server(engine, config) as running,
            openai.AsyncOpenAI(
                base_url=f"{running.url}/v1",
                api_key="none",
                max_retries=0,
                http_client=without_certificates(),
                _strict_response_validation=True,
            ) as client,
        ):
            yield client

    return run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the bundled model that reads tools, for tests to change."""
    return copy_that_reads_tools(tmp_path / "model")


Messages = Callable[..., AbstractAsyncContextManager[anthropic.AsyncAnthropic]]


@pytest.fixture
def messages(bundled: Bundled) -> Messages:
    """A client of a server with the bundled model."""

    @asynccontextmanager
    async def run(model: Path | None = None, **server: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
        async with (
            bundled(model, **server) as other,
            anthropic.AsyncAnthropic(
                base_url=site(other), api_key="none", max_retries=0, _strict_response_validation=True
            ) as client,
        ):
            yield client

    return run
