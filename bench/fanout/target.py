"""Targets: the processes that write to the clients. A server of this project over a null device, a bare
aiohttp writer with a task per stream, or readers in the engine's own process.

    python -m bench.fanout.target --kind server --streams 256 --step-ms 6

Prints the port of its streams and that of its probe when it is ready, and ends with SIGTERM. ``POST /probe``
forgets how late the loop was; ``GET /probe`` reports that, and sums whose differences are rates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceInfo
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.loop.tuning import FROZEN
from aioinfer.params import SamplingParams
from aioinfer.server import serve
from aioinfer.text.tokenizer import HFTokenizer
from bench.attack.target import LoopLag, holdings
from bench.fanout.device import NullDevice, real_text

__all__ = ["MAX_TOKENS", "PATH"]

PATH = "/v1/completions"
#: more than a stream gets while it is measured
MAX_TOKENS = 100_000
_PAGE = 4096


def make_engine(options: argparse.Namespace) -> Engine:
    """An engine over a null device, with the tokenizer of ``options.tokenizer``."""
    tokenizer = HFTokenizer.load(Path(options.tokenizer or EngineConfig().model_path))
    streams = options.streams
    pages = streams * (MAX_TOKENS // _PAGE + 2)
    info = DeviceInfo(tokenizer.vocab_size, 2 * MAX_TOKENS, pages, frozenset(), "takes its time")
    config = EngineConfig(
        model="fanout",
        page_size=_PAGE,
        num_pages=pages,
        max_running_requests=streams,
        max_step_tokens=16 * streams,
        max_queued_requests=2 * streams,
        prefix_cache=False,
        overlap_steps=1,
    )
    device = NullDevice(
        tokenizer.encode_part(real_text()),
        info,
        seconds=options.step_ms / 1e3,
        packing=options.packing_ms / 1e3,
        launching=options.launching_ms / 1e3,
        num_slots=config.num_slots,
    )
    return Engine(config, launcher=lambda _: ThreadLauncher(device), tokenizer=lambda _: tokenizer)


# -- what is measured ----------------------------------------------------------------------------------


async def _server(options: argparse.Namespace, stop: asyncio.Event) -> None:
    engine = make_engine(options)
    async with _probed(engine) as announce:
        await engine.start()
        frozen = FROZEN.hold(True)  # as the command line does
        try:
            await serve(
                engine,
                ServerConfig(port=0, max_connections=options.streams + 16),
                stop=stop,
                ready=lambda url: announce(int(url.rsplit(":", 1)[1])),
            )
        finally:
            FROZEN.release(frozen)
            await engine.aclose()


class BareWriter:
    """What aiohttp does without an engine: every step wakes a task per stream, which writes one event."""

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
            # Behind the tasks, which run in the next turn.
            self._loop.call_soon(self._loop.call_soon, self.step)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        head = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 0, "model": "fanout"}
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
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        writer.step()
        announce(runner.addresses[0][1])
        await stop.wait()
        await runner.cleanup()


async def _inprocess(options: argparse.Namespace, stop: asyncio.Event) -> None:
    engine = make_engine(options)
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


# -- the probe -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _probed(
    engine: Engine | None, counts: dict[str, int] | None = None
) -> AsyncIterator[Callable[[int], None]]:
    """Listens for questions; gives what prints the ports."""
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)

    async def begin(request: web.Request) -> web.Response:
        lag.start()
        return web.json_response({})

    async def tell(request: web.Request) -> web.Response:
        if "collect" in request.query:
            gc.collect()
        found = {"time": time.monotonic(), "loop_s": time.thread_time(), "lag_ms": lag.report()}
        if engine is not None:
            stats = engine.stats()
            lane = engine.timeline.device
            found |= {"running": stats.running, "tokens": stats.output_tokens, "busy_s": lane.busy}
        return web.json_response({**found, **(counts or {}), **holdings()})

    app = web.Application()
    app.router.add_post("/probe", begin)
    app.router.add_get("/probe", tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield lambda streams: print(streams, port, flush=True)
    finally:
        lag.stop()
        await runner.cleanup()


_KINDS = {"server": _server, "bare": _bare, "inprocess": _inprocess}


async def _run(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await _KINDS[options.kind](options, stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=[*_KINDS], default="server")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokenizer")
    for name in ("step", "packing", "launching"):
        parser.add_argument(f"--{name}-ms", type=float, default=0.0)
    options = parser.parse_args()
    factory: Any = asyncio.new_event_loop
    if options.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_run(options))


if __name__ == "__main__":
    main()
