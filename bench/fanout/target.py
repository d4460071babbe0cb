"""Targets: the processes that write to the clients. A server of this project over a null device, a bare
aiohttp writer with a task per stream, or readers in the engine's own process.

    python -m bench.fanout.target --kind server --streams 256 --step-ms 6

Prints the port of its streams and that of its probe when it is ready, and ends with SIGTERM. ``POST /probe``
resets the lateness of the loop; ``GET /probe`` reports it, and sums whose differences are rates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine
from aioinfer.loop.tuning import FROZEN
from aioinfer.params import SamplingParams
from aioinfer.server import serve
from bench.null_device import MAX_TOKENS, null_engine
from bench.report import percentiles

__all__ = ["PATH"]

PATH = "/v1/completions"
#: seconds between two looks at the loop
_INTERVAL = 0.002


async def _server(options: argparse.Namespace, stop: asyncio.Event) -> None:
    engine, _ = null_engine(options.streams, options.step_ms)
    async with _probed(engine) as announce, engine:
        frozen = FROZEN.hold(True)  # as the command line does
        config = ServerConfig(port=0, max_connections=options.streams + 16)
        try:
            await serve(engine, config, stop=stop, ready=lambda url: announce(int(url.rsplit(":", 1)[1])))
        finally:
            FROZEN.release(frozen)


class BareWriter:
    """aiohttp without an engine: every step wakes a task per stream, which writes one event."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[None]] = []
        self._due = self._loop.time()

    def step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self._due = max(self._due + self._seconds, self._loop.time())
        if self._seconds:
            self._loop.call_at(self._due, self.step)
        else:
            # After the tasks, which run in the next turn.
            self._loop.call_soon(self._loop.call_soon, self.step)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        head = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 0, "model": "null"}
        choice = {"index": 0, "text": " bare", "logprobs": None, "finish_reason": None}
        event = {**head, "system_fingerprint": "fp_0123456789", "choices": [choice]}
        frame = f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
        with contextlib.suppress(ConnectionError):  # the client has left
            while True:
                future: asyncio.Future[None] = self._loop.create_future()
                self._waiting.append(future)
                await future
                await response.write(frame)
        return response


async def _bare(options: argparse.Namespace, stop: asyncio.Event) -> None:
    writer = BareWriter(options.step_ms / 1e3)
    app = web.Application()
    app.router.add_post(PATH, writer.stream)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    async with _probed(None) as announce:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        writer.step()
        announce(runner.addresses[0][1])
        await stop.wait()
        await runner.cleanup()


async def _inprocess(options: argparse.Namespace, stop: asyncio.Event) -> None:
    engine, _ = null_engine(options.streams, options.step_ms)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

    async def read(number: int) -> None:
        async with engine.generate([number % 256, 5, 5, 5], params) as stream:
            async for _ in stream:
                counts["chunks"] += 1

    counts = {"chunks": 0}
    async with _probed(engine, counts) as announce, engine:
        frozen = FROZEN.hold(True)
        reading = [asyncio.create_task(read(number)) for number in range(options.streams)]
        announce(0)
        await stop.wait()
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        FROZEN.release(frozen)


class _LoopLag:
    """Lateness of timers. The loop's own clock is as coarse as a millisecond, which it adds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.late: list[float] = []
        self._due = loop.time()
        self.timer = loop.call_soon(self._fire)

    def _fire(self) -> None:
        self.late.append(1e3 * max(0.0, self._loop.time() - self._due))
        self._due = self._loop.time() + _INTERVAL
        self.timer = self._loop.call_at(self._due, self._fire)


@contextlib.asynccontextmanager
async def _probed(
    engine: Engine | None, counts: dict[str, int] | None = None
) -> AsyncIterator[Callable[[int], None]]:
    """Answer probes; yields a function that prints the ports."""
    lag = _LoopLag(asyncio.get_running_loop())

    async def begin(request: web.Request) -> web.Response:
        lag.late.clear()
        return web.json_response({})

    async def tell(request: web.Request) -> web.Response:
        found: dict[str, Any] = {"time": time.monotonic(), "loop_s": time.thread_time()}
        found["lag_ms"] = percentiles(lag.late)
        if engine is not None:
            found |= {"tokens": engine.stats().output_tokens, "busy_s": engine.timeline.device.busy}
        return web.json_response({**found, **(counts or {})})

    app = web.Application()
    app.router.add_post("/probe", begin)
    app.router.add_get("/probe", tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        yield lambda streams: print(streams, port, flush=True)
    finally:
        lag.timer.cancel()
        await runner.cleanup()


_KINDS = {"server": _server, "bare": _bare, "inprocess": _inprocess}


async def _run(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await _KINDS[options.kind](options, stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=[*_KINDS], default="server")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
