"""The server under attack: a process of its own that also says how late its loop is and what it holds.

    python -m bench.attack.target --loop uvloop --model tiny-chat

Prints its URL when it accepts requests and ends with SIGTERM. Beside the routes of the engine it has two of
its own: ``POST /probe`` begins an interval, ``GET /probe`` reports it (:class:`Probe`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.report import percentiles

__all__ = ["TOLERATED", "LoopLag", "holdings", "target_process"]

#: what a request may say beside 2xx without being an error of the server: refused, or told to come again
TOLERATED = frozenset({400, 401, 403, 404, 405, 408, 411, 413, 415, 422, 429, 431, 503})
#: seconds between two looks at the loop
_INTERVAL = 0.002


class LoopLag:
    """How late timers are. The loop's own clock is as coarse as a millisecond, which is what it adds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._late: list[float] = []
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._late.clear()
        self.stop()
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def report(self) -> dict[str, float]:
        """Milliseconds: p50, p99, p99.9 and maximum."""
        ordered = sorted(self._late)
        found = percentiles(ordered)
        if ordered:
            found["p99.9"] = ordered[min(len(ordered) - 1, int(0.999 * len(ordered)))]
        return {name: 1e3 * value for name, value in found.items()}

    def _arm(self) -> None:
        self._due = self._loop.time() + _INTERVAL
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._late.append(max(0.0, self._loop.time() - self._due))
        self._arm()


def holdings() -> dict[str, int]:
    """What this process holds: resident KiB, file descriptors, threads and tasks."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "rss_kib": int(resident.split()[1]),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
    }


async def _serve(arguments: argparse.Namespace) -> None:
    from aioinfer.config import EngineConfig, ServerConfig, parse_setting
    from aioinfer.engine import Engine
    from aioinfer.server import create_app

    pairs = (text.split("=", 1) for text in arguments.set)
    values = {name: parse_setting(EngineConfig, name, text) for name, text in pairs}
    engine = Engine(EngineConfig(model=arguments.model, **values))
    app = create_app(engine, ServerConfig(port=0))
    lag = LoopLag(asyncio.get_running_loop())

    async def begin(request: web.Request) -> web.Response:
        lag.start()
        return web.json_response({})

    async def end(request: web.Request) -> web.Response:
        gc.collect()
        stats = engine.stats()
        held = {name: getattr(stats, name) for name in ("running", "waiting") if hasattr(stats, name)}
        return web.json_response({"lag_ms": lag.report(), **holdings(), **held})

    app.router.add_post("/probe", begin)
    app.router.add_get("/probe", end)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    lag.stop()
    await runner.cleanup()


@contextmanager
def target_process(loop: str, model: str, settings: Sequence[str], log: Path) -> Iterator[tuple[str, Any]]:
    """A server in a process; gives its URL and the process. What it logs goes to the file ``log``."""
    command = [sys.executable, "-m", "bench.attack.target", "--loop", loop, "--model", model]
    for setting in settings:
        command += ["--set", setting]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
        yield url, process
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    factory: Any = asyncio.new_event_loop
    if arguments.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(arguments))


if __name__ == "__main__":
    main()
