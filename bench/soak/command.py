"""``python -m bench soak``: many clients of twelve kinds for minutes, with canaries.

    python -m bench soak --seconds 300 --clients 500
    python -m bench soak --loop asyncio --set num_pages=320

The server runs in a process of its own, in deterministic mode: the answer to a request must be the same
whatever runs beside it, and is compared with the first answer to that request. Memory is read every few
seconds; its slope over the requests is taken behind a warm-up. In the end the server must hold what it held
before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import aiohttp

from bench.attack.canaries import KINDS as CANARIES
from bench.attack.canaries import Canaries
from bench.attack.target import run_against_target
from bench.command import BadOptions
from bench.report import Report
from bench.soak.clients import KINDS, Soak

_SETTINGS = ("deterministic=true", "threads=1")
#: seconds between two rows
_PERIOD = 10.0
#: seconds of the same load before anything is counted
_WARM_UP = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--warm", type=float, default=0.4, help="share of the time before the slope is taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the engine")


def run(options: argparse.Namespace, report: Report) -> None:
    """A row every ten seconds; the slope and what is left as facts."""
    if options.clients < len(KINDS):
        raise BadOptions(f"--clients must be at least {len(KINDS)}: there is one of each kind")
    run_against_target(options, _SETTINGS, report, lambda url, probe: _measure(options, report, url, probe))


async def _measure(options: argparse.Namespace, report: Report, url: str, probe: str) -> None:
    soak = Soak(url)
    async with Canaries(url, probe) as canaries:
        alone = await canaries.watch(asyncio.sleep(5.0))
        # What is started with the first requests (threads, compiled grammars) belongs to "before".
        await _load(options, soak, _WARM_UP, canaries)
        before = await canaries.settled()
        shown = {f"{kind}_ms": alone[kind] for kind in CANARIES}
        report.row(second=0.0, requests=0, **_shown(before), **shown)
        samples = await _load(options, soak, options.seconds, canaries, report)
        after = await canaries.settled(before)
    report.fact("requests", dict(soak.counts))
    report.fact("kib_per_request", slope([pair for share, *pair in samples if share >= options.warm]))
    for name in ("fds", "threads", "tasks"):
        report.fact(f"{name} before and after", f"{before[name]} {after[name]}")
    report.fact("wrong", len(soak.wrong) + len(canaries.failures))
    for text in (soak.wrong + canaries.failures)[:5]:
        report.error(text[:500])


async def _load(
    options: argparse.Namespace, soak: Soak, seconds: float, canaries: Canaries, report: Report | None = None
) -> list[tuple[float, float, float]]:
    """(share of the time, requests so far, resident KiB) every few seconds."""
    samples: list[tuple[float, float, float]] = []
    names = list(KINDS)
    soak.stopped = False
    began = time.perf_counter()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as soak.session,
        asyncio.TaskGroup() as group,
    ):
        for at in range(options.clients):
            rng = random.Random(f"{options.seed}:{at}")
            group.create_task(soak.client(names[at % len(names)], rng))
        while (passed := time.perf_counter() - began) < seconds:
            slowest = await canaries.watch(asyncio.sleep(min(_PERIOD, seconds - passed)))
            probe = await canaries.probe()
            done, passed = sum(soak.counts.values()), time.perf_counter() - began
            samples.append((passed / seconds, done, probe["rss_kib"]))
            if report is not None:
                shown = {f"{kind}_ms": slowest[kind] for kind in CANARIES}
                report.row(second=passed, requests=done, **_shown(probe), **shown)
        soak.stopped = True
    return samples


def _shown(probe: dict[str, Any]) -> dict[str, Any]:
    lag = probe["lag_ms"]
    return {
        "rss_mib": probe["rss_kib"] / 1024,
        **{name: probe[name] for name in ("fds", "threads", "tasks", "running", "waiting")},
        "lag_p99.9_ms": lag.get("p99.9", 0.0),
        "lag_max_ms": lag.get("max", 0.0),
    }


def slope(pairs: list[list[float]]) -> float:
    """Least squares: how much the second grows with the first. 0 for fewer than two."""
    if len(pairs) < 2:
        return 0.0
    mean_x, mean_y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread else 0.0
