"""``python -m bench attack``: hostile requests, with canaries beside them.

    python -m bench attack                          all attacks, on uvloop
    python -m bench attack --loop asyncio --only stops ids

The server runs in a process of its own and says how late its loop is. Canaries are what ordinary clients see:
``GET /health`` every 20 ms, the gaps between the tokens of a stream, and the time to the last token of a
short request whose prompt is text. First they run alone for a while; then beside each attack, which comes
from a third process. ``waited_ms`` is how much longer the slowest canary of a kind waited than the slowest
without an attack.

An attack must not end the server, bring a 5xx other than 503, or leave anything behind: what the server
holds is compared before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

from bench.attack.attacks import ATTACKS
from bench.attack.canaries import KINDS, Canaries
from bench.attack.target import run_against_target
from bench.report import Report

#: slots for all choices of an attack and for the canaries: what is measured is the loop, not the queue
_SETTINGS = ("max_running_requests=512", "threads=1", "overlap_steps=1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=sorted(ATTACKS), metavar="NAME", help="these attacks")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--alone", type=float, default=5.0, help="seconds of canaries without an attack")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the engine")


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per attack."""
    run_against_target(options, _SETTINGS, report, lambda url, probe: _measure(options, report, url, probe))


async def _measure(options: argparse.Namespace, report: Report, url: str, probe: str) -> None:
    async with Canaries(url, probe) as canaries:
        await canaries.watch(asyncio.sleep(1.0))  # warm
        alone = await canaries.watch(asyncio.sleep(options.alone))
        lag = await canaries.probe()
        report.row(attack="none", **{f"{kind}_ms": alone[kind] for kind in KINDS}, **_lag(lag))
        for name in options.only or ATTACKS:
            await _attack(name, url, canaries, alone, report)


async def _attack(name: str, url: str, canaries: Canaries, alone: dict[str, float], report: Report) -> None:
    before = await canaries.settled()
    command = [sys.executable, "-m", "bench.attack.attacks", name, url]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()  # the attack is built
    process.stdin.write(b"go\n")
    began = time.perf_counter()
    slowest = await canaries.watch(process.stdout.readline())
    seconds = time.perf_counter() - began
    lag = await canaries.probe()
    seen: dict[str, int] = json.loads(canaries.result or b"{}")
    await process.wait()
    after = await canaries.settled(before)
    report.row(
        attack=name,
        **{f"{kind}_ms": slowest[kind] for kind in KINDS},
        waited_ms=max(slowest[kind] - alone[kind] for kind in KINDS),
        **_lag(lag),
        seconds=seconds,
        rss_mib=(after["rss_kib"] - before["rss_kib"]) / 1024,
        fds=after["fds"] - before["fds"],
        threads=after["threads"] - before["threads"],
        tasks=after["tasks"] - before["tasks"],
        answers=" ".join(f"{what}:{count}" for what, count in sorted(seen.items())),
    )
    if bad := [status for status in seen if status.startswith("5") and status != "503"]:
        report.error(f"{name}: {bad}")
    if canaries.failures:
        report.error(f"{name}: {len(canaries.failures)} canaries failed, the first: {canaries.failures[0]}")
        canaries.failures.clear()


def _lag(probe: dict[str, Any]) -> dict[str, float]:
    return {f"lag_{name}_ms": probe["lag_ms"].get(name, 0.0) for name in ("p99.9", "max")}
