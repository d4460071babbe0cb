"""``turn``, ``fork`` and ``save``: a held session's second turn, what a fork takes, and its file."""

from __future__ import annotations

import argparse
import asyncio
import mmap
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from bench.report import Report, percentiles
from bench.sessions.disk import drop, plain_read, plain_write
from bench.sessions.setting import child, gap, greedy, median, settings, tokens, ttft, warm_up

__all__ = ["fork", "save", "turn"]

#: tokens that a turn adds, tokens of its answer, turns of a session
_NEW, _OUTPUT, _TURNS = 16, 16, 5


def _engine(options: argparse.Namespace, **more: Any) -> Engine:
    """With room for two contexts."""
    return Engine(EngineConfig(**settings(options, 2 * options.context + 2048, **more)))


async def turn(options: argparse.Namespace, report: Report) -> None:
    """A row with medians over turns: TTFT beside one decode step and as many new tokens computed at that
    context, all before them cached; and beside the same step and a prompt of the new tokens alone."""
    rows = []
    async with _engine(options) as engine:
        await warm_up(engine)
        for number in range(options.rounds):
            async with engine.session() as session:
                first = await session.generate(tokens(options.context, number), greedy(_OUTPUT))
                cold, decode = ttft(first), gap(first)
                for at in range(_TURNS):
                    alone = await engine.generate(tokens(_NEW, 1000 * number + at + 500), greedy(2))
                    known = session.num_tokens
                    found = await session.generate(tokens(_NEW, 1000 * number + at + 100), greedy(_OUTPUT))
                    again = await engine.generate(
                        [*session.token_ids[:known], *tokens(_NEW, 1000 * number + at + 900)], greedy(2)
                    )
                    at_context = ttft(again) * _NEW / (known + _NEW - again.usage.cached_tokens)
                    step = decode + at_context
                    rows.append(
                        {
                            "cold_ms": 1e3 * cold,
                            "ttft_ms": 1e3 * ttft(found),
                            "decode_ms": 1e3 * decode,
                            "new_ms": 1e3 * at_context,
                            "ratio": ttft(found) / step,
                            "computed": known + _NEW - found.usage.cached_tokens,
                            "alone_ms": 1e3 * ttft(alone),
                            "of_alone": ttft(found) / (decode + ttft(alone)),
                        }
                    )
                    decode = gap(found)
    report.row(context=options.context, new_tokens=_NEW, turns=len(rows), **median(rows))
    report.fact("worst_ratio", max(row["ratio"] for row in rows))


async def fork(options: argparse.Namespace, report: Report) -> None:
    """A row: microseconds per fork, pages of KV that it takes, bytes of the interpreter."""
    async with _engine(options) as engine, engine.session() as session:
        await session.generate(tokens(options.context, 0), greedy(1))
        seconds, most = [], 0
        for _ in range(options.forks):
            before = engine.stats().pages_free
            start = time.perf_counter()
            made = session.fork()
            seconds.append(time.perf_counter() - start)
            most = max(most, before - engine.stats().pages_free)
            made.close()
        tracemalloc.start()
        made = session.fork()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        made.close()
        page = engine.info.page_bytes
    found = percentiles([1e6 * each for each in seconds])
    report.row(
        context=options.context,
        forks=options.forks,
        us_p50=found["p50"],
        us_p99=found["p99"],
        kv_bytes=most * page,
        host_bytes=kept,
    )


async def save(options: argparse.Namespace, report: Report) -> None:
    """A row for each place and way: bytes per second, and those of plain writing and reading there. Loads are
    in this process, with the file in the system's memory and out of it, and in a new process, beside a plain
    read into memory that is new, too."""
    # A pool for little more than one context: what is loaded lies where something was before.
    given = settings(options, options.context + 512, max_held_share=1.0)
    async with Engine(EngineConfig(**given)) as engine, engine.session() as session:
        await warm_up(engine)
        await session.generate(tokens(options.context, 0), greedy(1))
        for place in (options.folder, Path("/dev/shm")):
            with tempfile.TemporaryDirectory(dir=place) as folder:
                where = "disk" if place == options.folder else "/dev/shm"
                found: dict[str, list[tuple[float, float]]] = {}
                for _ in range(options.rounds):
                    size, seconds = await _save_once(engine, session, Path(folder), given)
                    for way, pair in seconds.items():
                        found.setdefault(way, []).append(pair)
                for way, pairs in found.items():
                    own, plain = (statistics.median(each) for each in zip(*pairs, strict=True))
                    report.row(
                        place=where,
                        way=way,
                        mib=size / 2**20,
                        seconds=own,
                        gb_per_s=size / own / 1e9,
                        plain_gb_per_s=size / plain / 1e9,
                        of_plain=statistics.median(other / mine for mine, other in pairs),
                    )


async def _save_once(
    engine: Engine, session: Any, folder: Path, given: dict[str, Any]
) -> tuple[int, dict[str, tuple[float, float]]]:
    """Bytes of the file, and by way the seconds of the session and of plain files."""
    path, other = folder / "session", folder / "plain"
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    await session.save(path)
    saving = time.perf_counter() - start
    size = path.stat().st_size
    data = memoryview(bytearray(path.read_bytes()))
    seconds = {"save": (saving, plain_write(other, data))}
    for way in ("load", "load dropped"):
        if way != "load":
            drop(folder)
        engine.flush_cache()
        start = time.perf_counter()
        loaded = await engine.load_session(path)
        seconds[way] = (time.perf_counter() - start, plain_read(other, data))
        loaded.close()
    arguments = {"settings": given, "output": 1, "path": str(path), "more": tokens(_NEW, 1)}
    found = await asyncio.to_thread(child, "load", **arguments)
    seconds["load elsewhere"] = found["seconds"], plain_read(other, memoryview(mmap.mmap(-1, size)))
    return size, seconds
