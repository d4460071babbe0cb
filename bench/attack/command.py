"""``python -m bench attack``: hostile requests to ``aioinfer serve``, with canaries beside them.

    python -m bench attack                              all attacks, one engine and then two replicas
    python -m bench attack --only stops deaf --replicas 1

Canaries are what ordinary clients see: ``GET /health`` every 20 ms, the gaps between the tokens of a stream,
and short requests. First they run alone; then beside each attack, which comes from a third process.
``waited_ms`` is how much longer the slowest canary of a kind waited than the slowest without an attack, and
``ordinary_ms`` the same beside as many ordinary requests of the same size, where the attack has such a twin:
what is no more than that is work that was asked for. Each attack is carried out twice. The first time buffers
grow to the largest batch; ``kept_mib`` is what the server and its replicas hold after the second and did not
before, ``lost`` how many replicas were lost. The goal is 100 ms, 20 MiB and none. An attack must bring no 5xx
but 503, and end nothing. "frozen" stops all replicas for 1.5 s, in which streams wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.attack.attacks import ATTACKS
from bench.report import Report

_KINDS = ("health", "gap", "short")
#: seconds between two of ``GET /health``; in which a server starts; in which it gives back what it held
_PAUSE, _STARTING, _SETTLING = 0.02, 120.0, 8.0
_FROZEN, _FROZEN_SECONDS = "frozen", 1.5
#: MiB that are no more than noise
_NOISE = 1.0
#: canaries have slots beside the largest attack, of 512 choices
_FLAGS = ("--threads", "1", "--port", "0", "--admin-port", "0", "--max-running-requests", "1024")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = sorted([*ATTACKS, _FROZEN])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these attacks")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--alone", type=float, default=5.0, help="seconds of canaries without an attack")


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per attack."""
    for replicas in options.replicas:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            flags = ["--replicas", str(replicas)] if replicas > 1 else []
            with _served([options.model, *_FLAGS, *flags], log) as target:
                asyncio.run(_measure(options, report, replicas, target))
            if count := log.read_text().count("Traceback"):
                report.error(f"replicas={replicas}: {count} tracebacks")


class _Target:
    """A server under attack."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int, admin: int) -> None:
        self.url, self.port, self.admin = f"http://127.0.0.1:{port}", str(port), str(admin)
        self.process, self._log = psutil.Process(process.pid), log

    @property
    def processes(self) -> list[psutil.Process]:
        """Itself and its replicas."""
        return [self.process, *self.replicas]

    @property
    def replicas(self) -> list[psutil.Process]:
        return [each for each in self.process.children() if "replica" in each.cmdline()]

    @property
    def mib(self) -> float:
        return float(sum(each.memory_info().rss for each in self.processes)) / (1 << 20)

    @property
    def lost(self) -> int:
        return self._log.read_text().count("is lost with")


@contextmanager
def _served(arguments: Sequence[str], log: Path) -> Iterator[_Target]:
    command = [sys.executable, "-m", "aioinfer", "serve", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end, found = time.monotonic() + _STARTING, list[str]()
        while len(found) < 2:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
            text = log.read_text()
            admin = re.findall(r"Admin routes on http://127\.0\.0\.1:(\d+)", text)
            found = [*re.findall(r"http://127\.0\.0\.1:(\d+)/v1", text)[:1], *admin]
        yield _Target(process, log, int(found[0]), int(found[1]))
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


class _Canaries:
    """Ordinary clients of a server, and how long the slowest of each kind waited, in milliseconds."""

    def __init__(self, url: str) -> None:
        self.failures: list[str] = []
        self._url = url
        self._slowest: dict[str, float] = {}

    async def watch(self, until: Awaitable[Any]) -> dict[str, float]:
        self._slowest = dict.fromkeys(_KINDS, 0.0)
        done = asyncio.ensure_future(until)
        timeout, connector = aiohttp.ClientTimeout(total=60.0), aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        async with session, asyncio.TaskGroup() as group:
            for canary in (self._health, self._stream, self._short):
                group.create_task(self._repeat(canary, session, done))
        done.result()
        return {kind: 1e3 * seconds for kind, seconds in self._slowest.items()}

    async def _repeat(self, canary: Any, session: aiohttp.ClientSession, done: asyncio.Future[Any]) -> None:
        while not done.done():
            try:
                await canary(session)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append(repr(error))
            await asyncio.sleep(_PAUSE)

    def _waited(self, kind: str, since: float) -> float:
        now = time.perf_counter()
        self._slowest[kind] = max(self._slowest[kind], now - since)
        return now

    async def _health(self, session: aiohttp.ClientSession) -> None:
        since = time.perf_counter()
        async with session.get(f"{self._url}/health") as response:
            await response.read()  # 503 while all replicas are silent is the truth
        self._waited("health", since)

    async def _short(self, session: aiohttp.ClientSession) -> None:
        since = time.perf_counter()
        body = {"prompt": "What is 17 + 25?", "max_tokens": 4, "temperature": 0}
        async with session.post(f"{self._url}/v1/completions", json=body, raise_for_status=True) as response:
            await response.read()
        self._waited("short", since)

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        body = {"prompt": [7, 8, 9], "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with session.post(f"{self._url}/v1/completions", json=body, raise_for_status=True) as response:
            since = None
            async for _ in response.content:
                since = time.perf_counter() if since is None else self._waited("gap", since)


async def _measure(options: argparse.Namespace, report: Report, replicas: int, target: _Target) -> None:
    canaries = _Canaries(target.url)
    await canaries.watch(asyncio.sleep(2.0))  # warm
    alone = await canaries.watch(asyncio.sleep(options.alone))
    names = options.only or [*ATTACKS, *([_FROZEN] if replicas > 1 else [])]
    for name in names:
        lost, slowest = target.lost, dict.fromkeys(_KINDS, 0.0)
        for _ in range(2):
            mib, began, seen = target.mib, time.perf_counter(), dict[str, int]()
            attack = _freeze(target) if name == _FROZEN else _attack(name, target, seen)
            found = await canaries.watch(attack)
            slowest = {kind: max(slowest[kind], found[kind]) for kind in _KINDS}
            seconds = time.perf_counter() - began
            kept = await _settled(target, mib)
        ordinary = {}
        if name in ATTACKS and ATTACKS[name].ordinary is not None:
            found = await canaries.watch(_attack(f"{name}/ordinary", target, {}))
            ordinary["ordinary_ms"] = max(found[kind] - alone[kind] for kind in _KINDS)
        report.row(
            replicas=replicas,
            attack=name,
            **{f"{kind}_ms": slowest[kind] for kind in _KINDS},
            waited_ms=max(slowest[kind] - alone[kind] for kind in _KINDS),
            **ordinary,
            kept_mib=kept,
            lost=target.lost - lost,
            seconds=seconds,
            answers=" ".join(f"{what}:{count}" for what, count in sorted(seen.items())),
        )
        if bad := [status for status in seen if status.startswith("5") and status != "503"]:
            report.error(f"replicas={replicas} {name}: {bad}")
        if canaries.failures:
            first = f"{len(canaries.failures)} canaries failed, the first: {canaries.failures[0]}"
            report.error(f"replicas={replicas} {name}: {first}")
            canaries.failures.clear()


async def _settled(target: _Target, mib: float) -> float:
    """MiB that the server holds beyond ``mib`` when it has had time to give back what it held."""
    kept, end = target.mib - mib, time.monotonic() + _SETTLING
    while kept > _NOISE and time.monotonic() < end:
        await asyncio.sleep(0.25)
        kept = target.mib - mib
    return kept


async def _attack(name: str, target: _Target, seen: dict[str, int]) -> None:
    command = [sys.executable, "-m", "bench.attack.attacks", name, "127.0.0.1", target.port, target.admin]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()  # it is built
    seen.update(json.loads((await process.communicate(b"go\n"))[0]))


async def _freeze(target: _Target) -> None:
    for each in target.replicas:
        each.suspend()
    await asyncio.sleep(_FROZEN_SECONDS)
    for each in target.replicas:
        each.resume()
    await asyncio.sleep(1.0)
