"""The server under attack: a process of its own that also says how late its loop is and what it holds.

    python -m bench.attack.target --loop uvloop --model tiny-chat

Prints its URL when it accepts requests, and that of the probe, and ends with SIGTERM. The probe listens on a
port of its own, on the same loop: ``POST /probe`` begins an interval, ``GET /probe`` reports it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from aioinfer.config import EngineConfig, ServerConfig, parse_setting
from aioinfer.engine import Engine
from aioinfer.loop.tuning import FROZEN
from aioinfer.server import serve
from bench.report import Report, percentiles

__all__ = ["LoopLag", "holdings", "run_against_target"]

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
    pairs = (text.split("=", 1) for text in arguments.set)
    values = {name: parse_setting(EngineConfig, name, text) for name, text in pairs}
    engine = Engine(EngineConfig(model=arguments.model, **values))
    lag = LoopLag(asyncio.get_running_loop())
    probe = await _listen(_probe(engine, lag))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await engine.start()
    frozen = FROZEN.hold(True)  # as the command line does
    address = f"http://127.0.0.1:{probe.addresses[0][1]}"
    try:
        await serve(
            engine, ServerConfig(port=0), stop=stop, ready=lambda url: print(url, address, flush=True)
        )
    finally:
        lag.stop()
        FROZEN.release(frozen)
        await engine.aclose()
        await probe.cleanup()


def _probe(engine: Engine, lag: LoopLag) -> web.Application:
    async def begin(request: web.Request) -> web.Response:
        lag.start()
        return web.json_response({})

    async def end(request: web.Request) -> web.Response:
        gc.collect()
        stats = engine.stats()
        held = {"running": stats.running, "waiting": stats.waiting + stats.arriving}
        return web.json_response({"lag_ms": lag.report(), **holdings(), **held})

    app = web.Application()
    app.router.add_post("/probe", begin)
    app.router.add_get("/probe", end)
    return app


async def _listen(app: web.Application) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


@contextmanager
def _target_process(
    loop: str, model: str, settings: Sequence[str], log: Path
) -> Iterator[tuple[str, str, Any]]:
    """A server in a process; gives its URL, that of its probe, and the process. What it logs goes to the
    file ``log``."""
    command = [sys.executable, "-m", "bench.attack.target", "--loop", loop, "--model", model]
    for setting in settings:
        command += ["--set", setting]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        if len(line) != 2:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
        yield line[0], line[1], process
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def run_against_target(
    options: argparse.Namespace,
    settings: Sequence[str],
    report: Report,
    measure: Callable[[str, str], Coroutine[Any, Any, None]],
) -> None:
    """Start a server, run ``measure(url, probe)``, and report a server that ended or logged a traceback.

    ``options`` has ``loop``, ``model`` and ``set``; ``settings`` are those of the bench.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with _target_process(options.loop, options.model, [*settings, *options.set], log) as target:
            url, probe, process = target
            asyncio.run(measure(url, probe))
            if process.poll() is not None:
                report.error(f"the server ended with {process.returncode}")
        if "Traceback" in (text := log.read_text()):
            last = text[text.rindex("Traceback") :][:2000]
            report.error(f"{text.count('Traceback')} tracebacks; the last: {last}")


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
